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

  // The same without an order of accesses: no WG goes on before all have come.
  PO_FN void meet() const {
#if PO_ON_DEVICE
    asm volatile("barrier.cluster.arrive.relaxed;\n barrier.cluster.wait.acquire;" ::: "memory");
#else
    sync();
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

  // Arrives at a handover of the WG with this rank. On the GPU it orders nothing: it is for a thread whose reads of
  // shared memory are those of its products, which it has awaited, and for a WG that lets tiles be copied there. A
  // release would be a fence of the whole GPU for each stage.
  PO_FN void arrive(Handover& own, int rank) const {
#if PO_ON_DEVICE
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there]; }" ::"r"(own.address()),
        "r"(rank)
        : "memory");
#else
    of(&own, rank)->arrive();
#endif
  }

  // Stores four numbers to the shared memory of the WG with this rank. They arrive in a round of `landed` there, as
  // tiles do. `own`, `landed`: the same objects in this WG.
  PO_FN void store_async(float* own, int rank, const float (&values)[4], Handover& landed) const {
#if PO_ON_DEVICE
    asm volatile(
        "{ .reg .b32 there, round; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 round, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [round]; }" ::"r"(
            static_cast<uint32_t>(__cvta_generic_to_shared(own))),
        "r"(landed.address()), "r"(rank), "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3])
        : "memory");
#else
    __builtin_memcpy(of(own, rank), values, sizeof(values));
    of(&landed, rank)->tile_has_come(sizeof(values));
#endif
  }

  // Starts a handover in which tiles arrive. One thread; a sync, or a meeting, of the cluster must follow.
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
