// Gives processes of one machine the names of two hosts, for tests of NVSHMEM; to be preloaded (LD_PRELOAD).
//
// NVSHMEM distinguishes hosts by gethostname() alone. RANK and WORLD_SIZE decide: the first half of the ranks is on
// host0. What NVSHMEM keeps in shared memory under fixed names must not be found on the other host. Other names stay as
// they are, since UCX, which stands in for a network, finds other processes by them.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

static int host(void) {
  const char* rank = getenv("RANK");
  const char* size = getenv("WORLD_SIZE");
  return rank && size && 2 * atoi(rank) >= atoi(size);
}

int gethostname(char* name, size_t size) {
  if ((size_t)snprintf(name, size, "host%d", host()) < size) return 0;
  errno = ENAMETOOLONG;
  return -1;
}

static const char* name_here(const char* name, char* room, size_t size) {
  const char* bare = name + (*name == '/');
  if (strncmp(bare, "sysmem_symm_heap", 16) != 0 && strncmp(bare, "mps_shm_", 8) != 0) return name;
  snprintf(room, size, "%s_host%d", name, host());
  return room;
}

int shm_open(const char* name, int flags, mode_t mode) {
  int (*next)(const char*, int, mode_t) = (int (*)(const char*, int, mode_t))dlsym(RTLD_NEXT, "shm_open");
  char room[256];
  return next(name_here(name, room, sizeof room), flags, mode);
}

int shm_unlink(const char* name) {
  int (*next)(const char*) = (int (*)(const char*))dlsym(RTLD_NEXT, "shm_unlink");
  char room[256];
  return next(name_here(name, room, sizeof room));
}
