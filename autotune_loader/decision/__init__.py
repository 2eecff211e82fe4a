"""What is legal, believed, worth trying and decided: pure functions of the evidence, without clock or process."""
