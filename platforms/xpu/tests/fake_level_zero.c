/* Plays libze_loader.so.1 for tests, as DESCRIPTION describes.

   Each call is written to the file that FAKE_LEVEL_ZERO_LOG names, with the process that made it, so
   that tests can tell what was loaded and called where. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct gpu {
    const char *name;
    unsigned char bytes[16];
    uint32_t kind, device_id, ip_version, flags, slices, cores_per_slice, engines_per_core;
    uint64_t memory;
    uint32_t bandwidth, shared;
    uint64_t cache;
    uint32_t sizes, sub_groups[8], module_flags;
};

#include DESCRIPTION

/* The heads of the structures of the specification, as far as they are filled. */
struct head {
    uint32_t stype;
    void *next;
};
struct driver {
    struct head head;
    unsigned char uuid[16];
    uint32_t version;
};
struct ip {
    struct head head;
    uint32_t version;
};
struct device {
    struct head head;
    uint32_t kind, vendor, device, flags, part, clock;
    uint64_t largest;
    uint32_t contexts, priorities, threads, lanes, engines, cores, slices;
    uint64_t timer;
    uint32_t timer_bits, kernel_timer_bits;
    unsigned char uuid[16];
    char name[256];
};
struct compute {
    struct head head;
    uint32_t group, group_sizes[3], group_counts[3], shared, sizes, sub_groups[8];
};
struct module {
    struct head head;
    uint32_t spirv, flags, floats[3], arguments, printf_bytes;
    unsigned char native[16];
};
struct memory_kind {
    struct head head;
    uint32_t kind;
    uint64_t physical;
    uint32_t read, write, unit;
};
struct memory {
    struct head head;
    uint32_t flags, clock, bus;
    uint64_t total;
    char name[256];
};
struct cache {
    struct head head;
    uint32_t flags;
    size_t bytes;
};

static void note(const char *call) {
    const char *path = getenv("FAKE_LEVEL_ZERO_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "%d %s\n", (int)getpid(), call);
        fclose(file);
    }
}

__attribute__((constructor)) static void loaded(void) { note("load libze_loader"); }

static int expected(void *structure, uint32_t stype) {
    return ((struct head *)structure)->stype == stype ? 0 : 0x78000004;
}

uint32_t zeInit(uint32_t flags) {
    note("zeInit");
    if (INIT_CRASHES) abort();
    if (INIT_SECONDS) sleep(INIT_SECONDS);
    return flags == 1 ? INIT : 0x78000004;
}
uint32_t zeDriverGet(uint32_t *count, void **handles) {
    if (handles) handles[0] = &GPUS;
    *count = 1;
    return 0;
}
uint32_t zeDriverGetProperties(void *driver, struct driver *properties) {
    (void)driver;
    properties->version = DRIVER;
    return expected(properties, 1);
}
uint32_t zeDeviceGet(void *driver, uint32_t *count, void **handles) {
    (void)driver;
    for (unsigned i = 0; handles && i < COUNT; i++) handles[i] = &GPUS[i];
    *count = COUNT;
    return 0;
}
uint32_t zeDeviceGetProperties(struct gpu *gpu, struct device *properties) {
    struct ip *ip = properties->head.next;
    if (ip->head.stype != 0x1000f) return 0x78000004;
    ip->version = gpu->ip_version;
    properties->kind = gpu->kind;
    properties->vendor = 0x8086;
    properties->device = gpu->device_id;
    properties->flags = gpu->flags;
    properties->slices = gpu->slices;
    properties->cores = gpu->cores_per_slice;
    properties->engines = gpu->engines_per_core;
    memcpy(properties->uuid, gpu->bytes, 16);
    snprintf(properties->name, 256, "%s", gpu->name);
    return expected(properties, 3);
}
uint32_t zeDeviceGetComputeProperties(struct gpu *gpu, struct compute *properties) {
    properties->shared = gpu->shared;
    properties->sizes = gpu->sizes;
    memcpy(properties->sub_groups, gpu->sub_groups, sizeof gpu->sub_groups);
    return expected(properties, 4);
}
uint32_t zeDeviceGetModuleProperties(struct gpu *gpu, struct module *properties) {
    properties->flags = gpu->module_flags;
    return expected(properties, 5);
}
uint32_t zeDeviceGetMemoryProperties(struct gpu *gpu, uint32_t *count, struct memory *found) {
    *count = 1;
    if (!found) return 0;
    found->total = gpu->memory;
    struct memory_kind *kind = found->head.next;
    if (kind->head.stype != 0x1000e) return 0x78000004;
    kind->physical = gpu->memory;
    kind->read = gpu->bandwidth;
    return expected(found, 7);
}
uint32_t zeDeviceGetCacheProperties(struct gpu *gpu, uint32_t *count, struct cache *found) {
    *count = 1;
    if (!found) return 0;
    found->bytes = gpu->cache;
    return expected(found, 9);
}
