// A replacement of GDRCopy (libgdrapi.so.2) for tests of NVSHMEM's remote transport on a machine without its driver.
//
// GDRCopy maps GPU memory for the CPU, and NVSHMEM's UCX transport performs signals through such a mapping. With
// NVSHMEM_HEAP_KIND=SYSMEM the heap is host memory, which the CPU reaches directly, so the "mapping" of a buffer is
// the buffer itself. Types and names match GDRCopy's public interface, version 2.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct gdr {
  int is_open;
}* gdr_t;

// The handle of a buffer is its address.
typedef struct {
  unsigned long h;
} gdr_mh_t;

// The start of GDRCopy's own structure, which later versions have only added to at its end.
typedef struct {
  uint64_t va;
  uint64_t mapped_size;
  uint32_t page_size;
  uint64_t tm_cycles;
  uint32_t cycles_per_ms;
  unsigned mapped : 1;
  unsigned wc_mapping : 1;
} gdr_info_t;

static struct gdr the_gdr;

// NVSHMEM asks for at least the minor version that it was compiled with.
void gdr_runtime_get_version(int* major, int* minor) {
  *major = 2;
  *minor = 99;
}

int gdr_driver_get_version(gdr_t gdr, int* major, int* minor) {
  (void)gdr;
  gdr_runtime_get_version(major, minor);
  return 0;
}

gdr_t gdr_open(void) {
  the_gdr.is_open = 1;
  return &the_gdr;
}

int gdr_close(gdr_t gdr) {
  gdr->is_open = 0;
  return 0;
}

int gdr_pin_buffer(gdr_t gdr, unsigned long address, size_t size, uint64_t p2p_token, uint32_t va_space,
                   gdr_mh_t* handle) {
  (void)gdr, (void)size, (void)p2p_token, (void)va_space;
  handle->h = address;
  return 0;
}

int gdr_unpin_buffer(gdr_t gdr, gdr_mh_t handle) {
  (void)gdr, (void)handle;
  return 0;
}

int gdr_map(gdr_t gdr, gdr_mh_t handle, void** address, size_t size) {
  (void)gdr, (void)size;
  *address = (void*)handle.h;
  return 0;
}

int gdr_unmap(gdr_t gdr, gdr_mh_t handle, void* address, size_t size) {
  (void)gdr, (void)handle, (void)address, (void)size;
  return 0;
}

int gdr_get_info(gdr_t gdr, gdr_mh_t handle, gdr_info_t* info) {
  (void)gdr;
  info->va = handle.h;
  info->mapped = 1;
  return 0;
}

int gdr_copy_to_mapping(gdr_mh_t handle, void* mapping, const void* source, size_t size) {
  (void)handle;
  memcpy(mapping, source, size);
  return 0;
}

int gdr_copy_from_mapping(gdr_mh_t handle, void* destination, const void* mapping, size_t size) {
  (void)handle;
  memcpy(destination, mapping, size);
  return 0;
}
