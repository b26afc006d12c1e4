/* Plays libnvidia-ml.so.1 (with -DNVML) or libcuda.so.1 for tests, as DESCRIPTION describes.

   Each call is written to the file that FAKE_DRIVER_LOG names, with the process that made it, so
   that tests can tell what was loaded and called where. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct gpu {
    const char *name, *uuid, *bus_id;
    unsigned char bytes[16];
    int major, minor;
    unsigned long long memory;
    int mig; /* -1: does not know the mode */
    const char *parts[8];
    int fault; /* what asking for its handle returns */
    int attributes[160];
    int peers[8];
};

#include DESCRIPTION

static void note(const char *call) {
    const char *path = getenv("FAKE_DRIVER_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "%d %s\n", (int)getpid(), call);
        fclose(file);
    }
}

#ifdef NVML
#define LIBRARY "libnvidia-ml"
#else
#define LIBRARY "libcuda"
#endif

__attribute__((constructor)) static void loaded(void) { note("load " LIBRARY); }

#ifdef NVML

struct pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};
struct memory {
    unsigned long long total, free, used;
};
static char empty_place;

const char *nvmlErrorString(int code) {
    switch (code) {
    case 3: return "Not Supported";
    case 6: return "Not Found";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    }
    return "Unknown Error";
}
int nvmlInit_v2(void) { note("nvmlInit_v2"); return NVML_INIT; }
int nvmlShutdown(void) { note("nvmlShutdown"); return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) {
    snprintf(text, length, "%s", DRIVER);
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDA; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = COUNT; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index >= COUNT) return 2;
    *device = (void *)&GPUS[index];
    return GPUS[index].fault;
}
int nvmlDeviceGetName(struct gpu *gpu, char *text, unsigned length) {
    snprintf(text, length, "%s", gpu->name);
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
    struct gpu *gpu = device;
    int whole = gpu >= GPUS && gpu < GPUS + COUNT;
    snprintf(text, length, "%s", whole ? gpu->uuid : (const char *)device);
    return 0;
}
int nvmlDeviceGetPciInfo_v3(struct gpu *gpu, struct pci *info) {
    memset(info, 0, sizeof *info);
    snprintf(info->bus_id, sizeof info->bus_id, "%s", gpu->bus_id);
    return 0;
}
int nvmlDeviceGetMemoryInfo(struct gpu *gpu, struct memory *memory) {
    memory->total = gpu->memory;
    memory->free = gpu->memory;
    memory->used = 0;
    return 0;
}
int nvmlDeviceGetCudaComputeCapability(struct gpu *gpu, int *major, int *minor) {
    *major = gpu->major;
    *minor = gpu->minor;
    return 0;
}
int nvmlDeviceGetMigMode(struct gpu *gpu, unsigned *current, unsigned *pending) {
    if (gpu->mig < 0) return 3;
    *current = *pending = (unsigned)gpu->mig;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(struct gpu *gpu, unsigned *count) {
    *count = gpu->mig > 0 ? 8 : 0;
    return 0;
}
int nvmlDeviceGetMigDeviceHandleByIndex(struct gpu *gpu, unsigned index, void **device) {
    if (index >= 8 || !gpu->parts[index]) {
        *device = &empty_place;
        return 6;
    }
    *device = (void *)gpu->parts[index];
    return 0;
}

#else

static int visible[8], num_visible, initialised;

int cuGetErrorString(int code, const char **text) {
    *text = code == 802 ? "system not yet initialized" : code == 100 ? "no device" : "unknown error";
    return 0;
}
int cuDriverGetVersion(int *version) { *version = CUDA; return 0; }
int cuInit(unsigned flags) {
    note("cuInit");
    sleep(CU_INIT_SECONDS);
    if (CU_INIT) return CU_INIT;
    if (CU_INIT_CRASHES) abort();
    initialised = flags == 0;
    /* Indices alone: what a list of other things means is not this file's to say. */
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; !list && i < COUNT; i++) visible[num_visible++] = i;
    for (const char *at = list; at && *at; at = strchr(at, ',') ? strchr(at, ',') + 1 : "") {
        int index = atoi(at);
        if (index < 0 || index >= COUNT) break;
        visible[num_visible++] = index;
    }
    return num_visible ? 0 : 100;
}
int cuDeviceGetCount(int *count) { *count = num_visible; return initialised ? 0 : 3; }
int cuDeviceGet(int *device, int ordinal) {
    *device = visible[ordinal];
    return initialised ? 0 : 3;
}
int cuDeviceGetName(char *text, int length, int device) {
    snprintf(text, (size_t)length, "%s", GPUS[device].name);
    return 0;
}
int cuDeviceGetUuid_v2(unsigned char *bytes, int device) {
    memcpy(bytes, GPUS[device].bytes, 16);
    return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = GPUS[device].memory;
    return 0;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute > NEWEST_ATTRIBUTE) return 1;
    *value = GPUS[device].attributes[attribute];
    return 0;
}
int cuDeviceCanAccessPeer(int *reaches, int device, int peer) {
    *reaches = GPUS[device].peers[peer];
    return 0;
}
int cuCtxCreate_v2(void **context, unsigned flags, int device) {
    note("cuCtxCreate_v2");
    *context = NULL;
    return (int)flags + device;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
    note("cuDevicePrimaryCtxRetain");
    *context = NULL;
    return device;
}

#endif
