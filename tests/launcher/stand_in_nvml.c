/* Stands in for libnvidia-ml.so.1: two healthy GPUs, or with the fault that NVML_FAULT names. Functions and layouts as in
 * nvml.h. No machine of the tests has a broken GPU. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { void *device; unsigned long long type, data; unsigned gpu, compute; } event;

static int fault(const char *name) {
    const char *asked = getenv("NVML_FAULT");
    return asked && !strcmp(asked, name);
}
static int second(void *device) { return device == (void *)2; }

int nvmlInit_v2(void) {
    if (fault("hang")) for (;;) pause();
    if (fault("crash")) abort();
    if (fault("slow")) sleep(4); /* a driver that starts its GPUs first */
    return fault("mismatch") ? 18 : fault("no driver") ? 9 : 0;
}
int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    strncpy(text, fault("old") ? "450.51.06" : "580.95.05", length);
    return 0;
}
int nvmlDeviceGetCount_v2(unsigned *count) { *count = fault("one is missing") ? 1 : 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = (void *)(unsigned long)(index + 1);
    return index == 1 && fault("lost") ? 15 : 0;
}
int nvmlDeviceGetTotalEccErrors(void *device, int type, int counter, unsigned long long *count) {
    if (fault("none of it")) return 3;
    if (fault("reset") && second(device)) return 16;
    *count = fault("ecc") && second(device) && type == 1 && counter == 0 ? 7 : 0;
    return 0;
}
int nvmlDeviceGetRemappedRows(void *device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    if (fault("none of it")) return 3;
    *corrected = 5;
    *uncorrected = 1;
    *pending = fault("pending") && second(device);
    *failed = fault("remap") && second(device);
    return 0;
}
#ifndef OLD_LIBRARY
int nvmlDeviceGetRetiredPagesPendingStatus(void *device, int *pending) { *pending = 0; return 3; }
#endif
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    *reasons = fault("hot") && second(device) ? 0x41 : 0x1;
    return 0;
}
typedef struct { unsigned char cluster[16]; int status; unsigned clique; unsigned char state; } fabric;

int nvmlDeviceGetGpuFabricInfo(void *device, fabric *info) {
    if (!fault("fabric") && !fault("fabric late")) return 3;
    memset(info, 0, sizeof *info);
    info->state = fault("fabric") ? 1 : second(device) ? 2 : 3;
    return 0;
}
/* Of libcuda.so.1: this file stands in for it, too. */
int cuInit(unsigned flags) { return fault("fabric") || fault("old fabric") ? 802 : 0; }

typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;

int nvmlDeviceGetUtilizationRates(void *device, utilization *rates) {
    static unsigned asked[2];
    const char *told = getenv("NVML_USE"); /* a FIFO that is opened and closed when a GPU was asked before */
    if (!told) return 3;
    if (++asked[second(device)] >= 2) close(open(told, O_WRONLY | O_NONBLOCK));
    *rates = (utilization){second(device) ? 50 : asked[0] > 1 ? 90 : 70, 1};
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory *bytes) {
    *bytes = (memory){1ull << 34, 1, (1ull << 33) + second(device)};
    return 0;
}
int nvmlEventSetCreate(void **set) { *set = (void *)9; return 0; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) { return types == 8 && set == (void *)9 ? 0 : 2; }
int nvmlEventSetWait_v2(void *set, event *data, unsigned milliseconds) {
    static int told;
    if (told++ || !(fault("xid") || fault("xid of a program"))) { usleep(milliseconds * 1000); return 10; }
    data->device = (void *)2;
    data->type = 8;
    data->data = fault("xid") ? 79 : 31;
    return 0;
}
