/* CUDA for machines without a GPU, as far as NCCL's EFA plugin and a libfabric with CUDA need it: one library that goes
 * by the names libcudart.so and libcuda.so.1. There is one device. Its memory has
 * addresses that a program may hand on and not touch, as a GPU's has: one that reads or writes there is ended by a signal.
 * CUDA's functions reach it, and so does a card with which it is registered: stand_in_memory().
 *
 * The plugin asks the runtime for its version and, one by one, for the driver's functions. Those that it calls have an
 * answer here. All others can be found, and do nothing but succeed. libfabric looks functions up by their names. Numbers
 * are those of CUDA's own headers.
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SUCCESS = 0, NO_MEMORY = 2, NOT_SUPPORTED = 801 };
enum { MEMORY_TYPE = 2, DEVICE_ORDINAL = 9 };
enum { HOST_MEMORY = 1, DEVICE_MEMORY = 2 };
enum { BLOCKS = 4096, PAGE = 4096 };

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

/* What has been allocated of the device. It is never given back: a test takes little. */
static struct {
    uint64_t start;
    size_t size;
    char *content;
} blocks[BLOCKS];
static int block_count;

static int block_of(uint64_t address) {
    for (int index = 0; index < block_count; index++) {
        if (address - blocks[index].start < blocks[index].size) return index;
    }
    return -1;
}

/* Where the content of an address is: another place for the device's memory, the same for the host's. */
void *stand_in_memory(uint64_t address) {
    int index = block_of(address);
    return index < 0 ? (void *)(uintptr_t)address : blocks[index].content + (address - blocks[index].start);
}

static int pointer_attributes(unsigned count, const int *attributes, void **values, uint64_t address) {
    for (unsigned index = 0; index < count; index++) {
        if (attributes[index] == MEMORY_TYPE) {
            *(unsigned *)values[index] = block_of(address) < 0 ? HOST_MEMORY : DEVICE_MEMORY;
        }
        if (attributes[index] == DEVICE_ORDINAL) *(int *)values[index] = 0;
    }
    return SUCCESS;
}

static int allocate(uint64_t *address, size_t size) {
    size = (size + PAGE - 1) / PAGE * PAGE;
    if (block_count == BLOCKS) return NO_MEMORY;
    void *place = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    void *content = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED || content == MAP_FAILED) return NO_MEMORY;
    blocks[block_count].start = *address = (uint64_t)(uintptr_t)place;
    blocks[block_count].content = content;
    blocks[block_count++].size = size;
    return SUCCESS;
}

static int release(uint64_t address) {
    (void)address;
    return SUCCESS;
}

static int set_bytes(uint64_t address, unsigned char byte, size_t size) {
    memset(stand_in_memory(address), byte, size);
    return SUCCESS;
}

static int copy_from_host(uint64_t target, const void *source, size_t size, void *stream) {
    (void)stream;
    memcpy(stand_in_memory(target), source, size);
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

/* What libfabric asks for. */

int cuGetErrorName(int error, const char **text) { return error_text(error, text); }
int cuGetErrorString(int error, const char **text) { return error_text(error, text); }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return device_attribute(value, attribute, device); }
int cuPointerGetAttributes(unsigned count, int *attributes, void **values, uint64_t address) {
    return pointer_attributes(count, attributes, values, address);
}
int cuPointerGetAttribute(void *value, int attribute, uint64_t address) {
    return pointer_attributes(1, &attribute, &value, address);
}
int cuPointerSetAttribute(const void *value, int attribute, uint64_t address) {
    (void)value, (void)attribute, (void)address;
    return SUCCESS;
}
int cuMemGetHandleForAddressRange(void *handle, uint64_t address, size_t size, int type, unsigned long long flags) {
    return address_range_handle(handle, address, size, type, flags);
}
int cuMemGetAddressRange_v2(uint64_t *start, size_t *size, uint64_t address) {
    int index = block_of(address);
    if (index < 0) return NOT_SUPPORTED;
    *start = blocks[index].start;
    *size = blocks[index].size;
    return SUCCESS;
}
int cuMemGetAddressRange(uint64_t *start, size_t *size, uint64_t address) {
    return cuMemGetAddressRange_v2(start, size, address);
}
/* What transfer.c asks for. */
int cuMemAlloc_v2(uint64_t *address, size_t size) { return allocate(address, size); }
int cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t size) { return copy_from_host(target, source, size, NULL); }
int cuMemcpyDtoH_v2(void *target, uint64_t source, size_t size) {
    memcpy(target, stand_in_memory(source), size);
    return SUCCESS;
}

int cuDeviceCanAccessPeer(int *can, int device, int other) {
    (void)device, (void)other;
    *can = 1;
    return SUCCESS;
}
int cuDeviceGet(int *device, int number) {
    *device = number;
    return SUCCESS;
}
const char *cudaGetErrorName(int error) { return (void)error, "an error of the stand-in for CUDA"; }
const char *cudaGetErrorString(int error) { return cudaGetErrorName(error); }
int cudaGetDevice(int *device) { return context_device(device); }
int cudaSetDevice(int device) { return (void)device, SUCCESS; }
int cudaDeviceSynchronize(void) { return SUCCESS; }
int cudaGetDeviceCount(int *count) {
    *count = 1;
    return SUCCESS;
}
int cudaMalloc(void **address, size_t size) { return allocate((uint64_t *)address, size); }
int cudaFree(void *address) { return release((uint64_t)(uintptr_t)address); }
int cudaMemcpy(void *target, const void *source, size_t size, int kind) {
    (void)kind;
    memcpy(stand_in_memory((uint64_t)(uintptr_t)target), stand_in_memory((uint64_t)(uintptr_t)source), size);
    return SUCCESS;
}
int cudaHostRegister(void *address, size_t size, unsigned flags) { return (void)address, (void)size, (void)flags, SUCCESS; }
int cudaHostUnregister(void *address) { return (void)address, SUCCESS; }
int cudaIpcGetMemHandle(void) { return NOT_SUPPORTED; }
int cudaIpcOpenMemHandle(void) { return NOT_SUPPORTED; }
int cudaIpcCloseMemHandle(void) { return NOT_SUPPORTED; }
