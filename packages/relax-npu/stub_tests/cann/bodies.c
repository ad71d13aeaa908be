/* The functions of CANN's runtime whose answers torch_npu uses; every other one that it names returns 0.

   A device is this host: its memory is malloc's, its streams and events have always ended, its kernels do
   nothing. Results of operators are therefore what happened to be in memory; tests execute them elsewhere. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TOTAL_MEMORY (64ull << 30)
#define ALIGNMENT 512
#define INVALID_DEVICE 107001

static __thread int32_t current;
static int64_t handles;

static uint32_t devices(void)
{
    const char *told = getenv("RELAX_STUB_NPUS");
    return told ? (uint32_t)atoi(told) : 2;
}

static int give_handle(void **handle)
{
    *handle = (void *)(uintptr_t)(0x1000 + 16 * __sync_add_and_fetch(&handles, 1));
    return 0;
}

static int give_memory(void **memory, size_t size)
{
    return posix_memalign(memory, ALIGNMENT, size ? size : 1) ? 207001 : 0;
}

/* Devices */
int aclrtGetDeviceCount(uint32_t *count) { *count = devices(); return 0; }
int aclrtGetDevice(int32_t *device) { *device = current; return 0; }
int aclrtSetDevice(int32_t device)
{
    if (device < 0 || (uint32_t)device >= devices())
        return INVALID_DEVICE;
    current = device;
    return 0;
}
const char *aclrtGetSocName(void) { return "Ascend910_9391"; }
const char *aclGetRecentErrMsg(void) { return ""; }
int aclGetDeviceCapability(uint32_t device, int kind, int64_t *value) { *value = 24; return 0; }
int aclrtGetDeviceInfo(uint32_t device, int kind, int64_t *value) { *value = 24; return 0; }
int aclrtGetDeviceResLimit(int32_t device, int kind, uint32_t *value) { *value = 24; return 0; }
int aclrtDeviceCanAccessPeer(int32_t *can, int32_t one, int32_t other) { *can = 1; return 0; }
int aclrtGetMemInfo(int kind, size_t *free_bytes, size_t *total) { *free_bytes = *total = TOTAL_MEMORY; return 0; }
int aclrtDeviceGetBareTgid(int32_t *pid) { *pid = 1; return 0; }
int aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *active) { *active = 1; return 0; }

/* Contexts, streams, events: handles without anything behind them */
int aclrtGetCurrentContext(void **context) { *context = (void *)0x100; return 0; }
int aclrtCreateStream(void **stream) { return give_handle(stream); }
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flag) { return give_handle(stream); }
int aclrtCreateEventWithFlag(void **event, uint32_t flag) { return give_handle(event); }
int aclrtCreateEventExWithFlag(void **event, uint32_t flag) { return give_handle(event); }
int aclrtEventElapsedTime(float *ms, void *start, void *end) { *ms = 0.0f; return 0; }
int aclrtQueryEventStatus(void *event, int *status) { *status = 1; return 0; }
int aclrtQueryEventWaitStatus(void *event, int *status) { *status = 1; return 0; }
int aclrtStreamGetId(void *stream, int32_t *id) { *id = (int32_t)(uintptr_t)stream; return 0; }

/* Memory */
int aclrtMalloc(void **memory, size_t size, int policy) { return give_memory(memory, size); }
int aclrtMallocAlign32(void **memory, size_t size, int policy) { return give_memory(memory, size); }
int aclrtMallocHost(void **memory, size_t size) { return give_memory(memory, size); }
int aclrtMallocHostWithCfg(void **memory, size_t size, void *config) { return give_memory(memory, size); }
int aclrtFree(void *memory) { free(memory); return 0; }
int aclrtFreeHost(void *memory) { free(memory); return 0; }
int aclrtMemset(void *memory, size_t limit, int32_t value, size_t count) { memset(memory, value, count); return 0; }
int aclrtMemcpy(void *to, size_t limit, const void *from, size_t count, int kind)
{
    memmove(to, from, count);
    return 0;
}
int aclrtMemcpyAsync(void *to, size_t limit, const void *from, size_t count, int kind, void *stream)
{
    memmove(to, from, count);
    return 0;
}

/* Objects of operator calls, and the compiler's options */
void *aclCreateTensorDesc(int dtype, int axes, const int64_t *shape, int format) { return malloc(1); }
void aclDestroyTensorDesc(const void *description) { free((void *)description); }
void *aclCreateDataBuffer(void *data, size_t size) { return malloc(1); }
int aclDestroyDataBuffer(const void *buffer) { free((void *)buffer); return 0; }
void *aclopCreateAttr(void) { return malloc(1); }
void aclopDestroyAttr(const void *attributes) { free((void *)attributes); }
size_t aclGetCompileoptSize(int option) { return 16; }
int aclGetCompileopt(int option, char *value, size_t length)
{
    strncpy(value, "", length);
    return 0;
}
