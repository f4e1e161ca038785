// What C++ has no words for: functions of an instruction or two. They stand before each kernel's source (native.py). Tests
// have others of the same names, so that kernels run where there is no such device (tests/host.cuh).

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// Of the second-level cache: what stays there, and what goes first.
enum Hint : u64 { USUAL = 0x1000000000000000, STAYS = 0x14F0000000000000, GOES = 0x12F0000000000000 };

__device__ __forceinline__ u32 shared(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Copies by threads, to shared memory. Where there is nothing to copy zeros come.

__device__ __forceinline__ void copy(u32 to, const void* from, bool there) {  // 16 bytes
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0));
}

__device__ __forceinline__ void copy_number(u32 to, const float* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(there ? 4 : 0));
}

__device__ __forceinline__ void end_of_group() { asm volatile("cp.async.commit_group;"); }

template <int MOST>
__device__ __forceinline__ void wait_for_groups() {  // all but the last MOST
    asm volatile("cp.async.wait_group %0;" ::"n"(MOST) : "memory");
}

template <typename Many>
__device__ __forceinline__ Many shared_at(u32 at);
template <>
__device__ __forceinline__ float shared_at(u32 at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at));
    return x;
}
template <>
__device__ __forceinline__ float2 shared_at(u32 at) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
    return x;
}
template <>
__device__ __forceinline__ float4 shared_at(u32 at) {
    float4 x;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(at));
    return x;
}
template <>
__device__ __forceinline__ uint4 shared_at(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at));
    return x;
}
template <>
__device__ __forceinline__ unsigned short shared_at(u32 at) {
    unsigned short x;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(x) : "r"(at));
    return x;
}
template <>
__device__ __forceinline__ uint2 shared_at(u32 at) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(at));
    return x;
}

__device__ __forceinline__ void to_shared(u32 at, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
__device__ __forceinline__ void to_shared(u32 at, float2 x) {
    asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(at), "f"(x.x), "f"(x.y) : "memory");
}

// Copies by the unit for them, of a box of a matrix to shared memory; and barriers that count what has come. Inputs beyond a
// matrix are zeros.

struct alignas(64) Map { char bytes[128]; };  // where that unit finds a matrix

__device__ __forceinline__ void init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void end_of_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier, u32 block) {  // at that of another block of the cluster
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(block) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n}" ::"r"(barrier), "r"(phase) : "memory");
}

__device__ __forceinline__ void fetch(u32 to, const Map* map, int input, int row, u32 barrier, Hint hint) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(input), "r"(row), "r"(barrier), "l"((u64)hint) : "memory");
}

__device__ __forceinline__ void fetch(u32 to, const Map* map, const int (&at)[5], u32 barrier, Hint hint) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to), "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
        "r"(at[4]), "r"(barrier), "l"((u64)hint) : "memory");
}

template <int MANY>  // blocks of the cluster
__device__ __forceinline__ void fetch_for_all(u32 to, const Map* map, int input, int row, u32 barrier, Hint hint) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
        "[%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to), "l"(map), "r"(input), "r"(row), "r"(barrier),
        "h"((unsigned short)((1 << MANY) - 1)), "l"((u64)hint) : "memory");
}

__device__ __forceinline__ u32 block_of_cluster() {
    u32 which;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(which));
    return which;
}

__device__ __forceinline__ void cluster_is_here() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Products.

__device__ __forceinline__ void add_product(float (&to)[4], const float (&left)[4], float first, float second) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
        : "r"(__float_as_uint(left[0])), "r"(__float_as_uint(left[1])), "r"(__float_as_uint(left[2])),
          "r"(__float_as_uint(left[3])), "r"(__float_as_uint(first)), "r"(__float_as_uint(second)));
}

// Of numbers in bfloat16, two in each word.
__device__ __forceinline__ void add_product(float (&to)[4], const u32 (&left)[4], u32 first, u32 second) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(first), "r"(second));
}

#ifdef WIDTH  // of products of four warps: 64 rows and so many columns, of which each thread has half as many
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void add_wide_product(float (&sums)[WIDTH / 2], u64 left, u64 right) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n" TEXT(WIDTH) "k16.f32.bf16.bf16 "
        "{" SUMS "}, %" LEFT ", %" RIGHT ", 1, 1, 1, 0, 0;"
        : SUMMED(sums) : "l"(left), "l"(right));
}

__device__ __forceinline__ void end_of_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int MOST>
__device__ __forceinline__ void wait_for_products() {  // all but the last MOST
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(MOST) : "memory");
}

__device__ __forceinline__ void not_used_before(float (&sums)[WIDTH / 2]) {
    asm volatile("" : SUMMED(sums)::"memory");
}
#endif

template <bool MORE, int REGISTERS>
__device__ __forceinline__ void have_registers() {
    if (MORE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

__device__ __forceinline__ u32 packed(float first, float second) {  // rounded to bfloat16
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
