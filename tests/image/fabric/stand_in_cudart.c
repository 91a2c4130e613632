/* A CUDA runtime for machines without a GPU, as far as NCCL's EFA plugin needs one: it goes by the name libcudart.so.
 *
 * The plugin asks the runtime for its version and, one by one, for the driver's functions. Those that it calls for
 * buffers in host memory have an answer here. All others can be found, and do nothing but succeed: they are called for
 * buffers of a GPU only. Numbers are those of CUDA's own headers.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 801 };
enum { MEMORY_TYPE = 2, DEVICE_ORDINAL = 9 };
enum { HOST_MEMORY = 1 };

/* STAND_IN_VERSION is given when this is compiled: 12010 is CUDA 12.1. The plugin chooses by it how it asks. */

static int succeed(void) { return SUCCESS; }

static int driver_version(int *version) {
    *version = STAND_IN_VERSION;
    return SUCCESS;
}

static int error_text(int error, const char **text) {
    (void)error;
    *text = "an error of the stand-in for CUDA";
    return SUCCESS;
}

static int context_device(int *device) {
    *device = 0;
    return SUCCESS;
}

/* No GPUDirect RDMA, no DMA-BUF. */
static int device_attribute(int *value, int attribute, int device) {
    (void)attribute, (void)device;
    *value = 0;
    return SUCCESS;
}

static int address_range_handle(void *handle, uint64_t address, size_t size, int type, unsigned long long flags) {
    (void)handle, (void)address, (void)size, (void)type, (void)flags;
    return NOT_SUPPORTED;
}

/* Every pointer is one to host memory. */
static int pointer_attributes(unsigned count, const int *attributes, void **values, uint64_t address) {
    (void)address;
    for (unsigned index = 0; index < count; index++) {
        if (attributes[index] == MEMORY_TYPE) *(unsigned *)values[index] = HOST_MEMORY;
        if (attributes[index] == DEVICE_ORDINAL) *(int *)values[index] = 0;
    }
    return SUCCESS;
}

static int allocate(uint64_t *address, size_t size) {
    void *memory = calloc(1, size);
    *address = (uint64_t)(uintptr_t)memory;
    return memory ? SUCCESS : 2;
}

static int release(uint64_t address) {
    free((void *)(uintptr_t)address);
    return SUCCESS;
}

static int set_bytes(uint64_t address, unsigned char byte, size_t size) {
    memset((void *)(uintptr_t)address, byte, size);
    return SUCCESS;
}

static int copy_from_host(uint64_t target, const void *source, size_t size, void *stream) {
    (void)stream;
    memcpy((void *)(uintptr_t)target, source, size);
    return SUCCESS;
}

typedef int (*function)(void);

static const struct {
    const char *name;
    function address;
} ANSWERS[] = {
    {"cuDriverGetVersion", (function)driver_version},
    {"cuGetErrorName", (function)error_text},
    {"cuGetErrorString", (function)error_text},
    {"cuCtxGetDevice", (function)context_device},
    {"cuDeviceGetAttribute", (function)device_attribute},
    {"cuMemGetHandleForAddressRange", (function)address_range_handle},
    {"cuPointerGetAttributes", (function)pointer_attributes},
    {"cuMemAlloc", (function)allocate},
    {"cuMemFree", (function)release},
    {"cuMemsetD8", (function)set_bytes},
    {"cuMemcpyHtoDAsync", (function)copy_from_host},
};

static int find(const char *name, void **address, int *found) {
    function answer = succeed;
    for (size_t index = 0; index < sizeof ANSWERS / sizeof *ANSWERS; index++) {
        if (!strcmp(name, ANSWERS[index].name)) answer = ANSWERS[index].address;
    }
    memcpy(address, &answer, sizeof answer);
    if (found) *found = 0;
    return SUCCESS;
}

int cudaRuntimeGetVersion(int *version) { return driver_version(version); }

#if STAND_IN_VERSION < 13000
int cudaGetDriverEntryPoint(const char *name, void **address, unsigned long long flags, int *found) {
    (void)flags;
    return find(name, address, found);
}
#else
int cudaGetDriverEntryPointByVersion(
    const char *name, void **address, unsigned version, unsigned long long flags, int *found
) {
    (void)version, (void)flags;
    return find(name, address, found);
}
#endif
