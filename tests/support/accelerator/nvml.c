/* A stand-in of libnvidia-ml.so.1, as far as `pynvml` is asked for it: GPUs whose utilization is known at every moment.

   NVML_STANDIN has a line for each device, and of MIG instances:

       UUID  period_us  is_mig  error_of_rates  error_of_samples  used_bytes  us:percent,us:percent,...

   The levels follow one another again and again from the epoch on. As with NVML a mean is of the last whole period, and some
   samples are kept. The clock is the machine's unless `standin_now_us` is set.
*/
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

#define MOST 8
#define KEPT 100
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

typedef unsigned long long u64;
typedef struct {
    char uuid[64];
    long long period_us;
    int is_mig, error_of_rates, error_of_samples, levels;
    u64 used_bytes;
    long long us[MOST];
    double percent[MOST];
} Device;
typedef struct { u64 time_us; union { double d; unsigned int u; u64 all; } value; } Sample;

long long standin_now_us = 0;
static Device devices[MOST];
static int count = 0;

static long long now_us(void) {
    struct timeval now;
    if (standin_now_us) return standin_now_us;
    gettimeofday(&now, NULL);
    return now.tv_sec * 1000000LL + now.tv_usec;
}

static double until(const Device *device, long long at) {
    double whole = 0, sum = 0;
    long long cycle = 0, rest;
    for (int i = 0; i < device->levels; i++) cycle += device->us[i], whole += device->us[i] * device->percent[i];
    if (!cycle) return 0;  /* nobody has opened the library yet */
    sum = (double)(at / cycle) * whole, rest = at % cycle;
    for (int i = 0; i < device->levels && rest > 0; i++, rest -= device->us[i - 1])
        sum += (rest < device->us[i] ? rest : device->us[i]) * device->percent[i];
    return sum;
}

static double mean(const Device *device, long long begin, long long end) {
    return (until(device, end) - until(device, begin)) / (double)(end - begin);
}

/* What is true of a device between two moments. */
double standin_mean(int device, long long begin, long long end) { return mean(&devices[device], begin, end); }

int nvmlInitWithFlags(unsigned int flags) {
    char text[4096] = "", *line, *rest = text, levels[512], *level, *more;
    const char *error = getenv("NVML_STANDIN_ERROR");
    (void)flags;
    if (error) return atoi(error);
    strncpy(text, getenv("NVML_STANDIN") ? getenv("NVML_STANDIN") : "", sizeof text - 1);
    count = 0;
    while ((line = strtok_r(rest, "\n", &rest)) && count < MOST) {
        Device *one = &devices[count];
        if (sscanf(line, " %63s %lld %d %d %d %llu %511s", one->uuid, &one->period_us, &one->is_mig, &one->error_of_rates,
                   &one->error_of_samples, &one->used_bytes, levels) != 7) continue;
        for (one->levels = 0, more = levels; (level = strtok_r(more, ",", &more)) && one->levels < MOST; one->levels++)
            sscanf(level, "%lld:%lf", &one->us[one->levels], &one->percent[one->levels]);
        count++;
    }
    return SUCCESS;
}

const char *nvmlErrorString(int error) { (void)error; return "an error of the stand-in"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **device) {
    for (int i = 0; i < count; i++)
        if (!strcmp(devices[i].uuid, uuid)) return *device = &devices[i], SUCCESS;
    return NOT_FOUND;
}

int nvmlDeviceGetMigMode(Device *device, unsigned int *current, unsigned int *pending) {
    *current = *pending = device->is_mig == 1;
    return device->is_mig < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Device *device, unsigned int rates[2]) {
    long long end = now_us() / device->period_us * device->period_us;
    rates[0] = (unsigned int)(mean(device, end - device->period_us, end) + 0.5), rates[1] = 0;
    return device->error_of_rates;
}

int nvmlDeviceGetMemoryInfo(Device *device, u64 memory[3]) {
    memory[0] = 80ULL << 30, memory[2] = device->used_bytes, memory[1] = memory[0] - memory[2];
    return device->used_bytes ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetSamples(Device *device, int kind, u64 last_us, int *value_kind, unsigned int *found, Sample *samples) {
    long long period = device->period_us, end = now_us() / period;
    unsigned int room = *found, n = 0;
    if (device->error_of_samples) return device->error_of_samples;
    if (kind != 1) return INVALID_ARGUMENT;
    *value_kind = 1;
    for (long long at = end - KEPT; at <= end; at++) {
        if ((u64)(at * period) <= last_us) continue;
        if (samples && n < room) {
            samples[n].value.all = 0, samples[n].time_us = at * period;
            samples[n].value.u = (unsigned int)(mean(device, (at - 1) * period, at * period) + 0.5);
        }
        n++;
    }
    *found = samples && n > room ? room : n;
    return n ? SUCCESS : NOT_FOUND;
}
