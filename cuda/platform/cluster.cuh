// Clusters: kClusterSize<> WGs with neighboring indices, which become resident together and reach each other's shared
// memory. On the host a cluster's WGs are threads like all others, with one more barrier.
#pragma once

#include "platform/groups.cuh"

#if PO_ON_DEVICE && defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "clusters need sm_90"
#endif

namespace po {

class Cluster {
 public:
  static constexpr int kSize = kClusterSize<>;

  PO_FN explicit Cluster(const WorkGroup& wg) : wg_(wg) {}

  PO_FN int rank() const { return wg_.index() % kSize; }  // of this WG

  // All threads of all WGs of the cluster. Their accesses to each other's shared memory are visible to all of them
  // afterwards.
  PO_FN void sync() const {
#if PO_ON_DEVICE
    asm volatile("barrier.cluster.arrive.release;\n barrier.cluster.wait.acquire;" ::: "memory");
#else
    pthread_barrier_wait(wg_.cluster_barrier_);
#endif
  }

  // The address, in the shared memory of the WG with this rank, of the object that lies at `own` in this WG's. A WG
  // must not end while another one uses its memory: a sync comes before.
  template <class T>
  PO_FN T* of(T* own, int rank) const {
#if PO_ON_DEVICE
    uint64_t address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(own), "r"(rank));
    return reinterpret_cast<T*>(address);
#else
    return reinterpret_cast<T*>(reinterpret_cast<uint8_t*>(own) + (rank - this->rank()) * wg_.bytes_to_next_);
#endif
  }

  // Starts a handover in which tiles arrive. One thread; a sync of the cluster must follow.
  PO_FN void start(Handover& handover, int arrivals_per_round) const {
    handover.start(arrivals_per_round);
#if PO_ON_DEVICE
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  }

 private:
  const WorkGroup& wg_;
};

}  // namespace po
