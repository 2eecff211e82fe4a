/* A libnvidia-ml.so.1 with three GPUs, one of which has an instance. FAKE_NVML has a name of a call and the code of its
   refusal, and the only GPU that it is refused for, if it is not for all: "nvmlDeviceGetName=4@1". */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static const char *uuids[] = {"GPU-aaaa1111", "GPU-aabb2222", "GPU-cccc3333", "MIG-dddd4444"};
static int answer(const char *call, long gpu) {
  const char *asked = getenv("FAKE_NVML"), *only = asked ? strchr(asked, '@') : NULL;
  size_t length = strlen(call);
  int is_refused = asked && !strncmp(asked, call, length) && asked[length] == '=' && (!only || atol(only + 1) == gpu);
  return is_refused ? atoi(asked + length + 1) : 0;
}
int nvmlInitWithFlags(unsigned flags) { return answer("nvmlInit", 0); }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = getenv("NO_GPU") ? 0 : 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned at, long *gpu) { *gpu = at; return answer("nvmlDeviceGetHandleByIndex", at); }
int nvmlDeviceGetHandleByUUID(const char *uuid, long *gpu) { *gpu = 3; return strcmp(uuid, uuids[3]) ? 6 : 0; }
int nvmlDeviceGetUUID(long gpu, char *text, unsigned size) { return snprintf(text, size, "%s", uuids[gpu]) < 0; }
int nvmlDeviceGetName(long gpu, char *text, unsigned size) {
  snprintf(text, size, "%s", gpu == 3 ? "H100 MIG 1g.10gb" : &"A\0B\0C"[2 * gpu]);
  return answer("nvmlDeviceGetName", gpu);
}
int nvmlDeviceGetMemoryInfo(long gpu, unsigned long long *memory) {
  memory[0] = gpu == 3 ? 10ull << 30 : 80ull << 30;
  return answer("nvmlDeviceGetMemoryInfo", gpu);
}
