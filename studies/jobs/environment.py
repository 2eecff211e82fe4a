"""What the jobs need beside torch: packages that ship their data, and decoders."""

from __future__ import annotations

from studies.libraries.environments import NO_DEPS, TORCHVISION, Environment

JOBS = Environment(
    "jobs",
    (
        *("scikit-image==0.26.0", "mlxtend==0.25.0", "scikit-video==1.1.11", "aeon==1.6.0", "gensim==4.4.0"),
        *("pydicom==3.0.2", "pylibjpeg==2.1.0", "pylibjpeg-openjpeg==2.6.0", "av==18.1.0", TORCHVISION),
    ),
    NO_DEPS,
)
