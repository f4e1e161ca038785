// activation(gate) · up of some hundred rows, in bfloat16, on Hopper's matrix units: x [T, I] times a weight [2O, I] that has
// O gates and below them what these gate.
//
// A block of threads makes WIDTH/2 outputs of all rows, so that there is just about one block for each processor; the library
// has tiles of powers of two, of which there are a few more than processors, and most wait for those.
//
// One group of four warps has rows and weights copied to a ring of stages in shared memory. The others, GROUPS of them,
// each multiply some tiles of 64 rows with all weights of a stage. A CLUSTER of blocks see each other's shared memory:
// each fetches a part of the rows for all, since all that the second-level cache would have to give otherwise is more
// than it can.
//
// Defined where this is compiled: TILES of rows, GROUPS, WIDTH (a multiple of 16), STAGES of SPAN inputs (64), CLUSTER, ACTIVATED(x), the
// registers of a thread as the kernel begins (ENTRY), of groups (WHOLE) and of the last one (LAST); and of the WIDTH/2 sums of
// a thread for a tile SUMS, their operands in `asm`, and SUMMED(sums), the variables that these are.

constexpr int ROWS = TILES * 64, EACH = (TILES + GROUPS - 1) / GROUPS;  // inputs of a stage: 128 bytes
constexpr int X_BYTES = ROWS * SPAN * 2, BYTES = X_BYTES + WIDTH * SPAN * 2;

__device__ __forceinline__ void fetch_weights(u32 to, const Map* map, int turn, int first, int outputs, u32 barrier) {
    expect(barrier, BYTES);  // with the rows, which come by themselves
    fetch(to + X_BYTES, map, turn * SPAN, first, barrier, GOES);
    fetch(to + X_BYTES + WIDTH * SPAN, map, turn * SPAN, outputs + first, barrier, GOES);
}

__device__ __forceinline__ u64 matrix(u32 at) {  // rows of 128 bytes in shared memory, eight of them swizzled together
    return (u64)((at & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xFFFF0000); }

__device__ __forceinline__ float activated(float x) { return low(packed(ACTIVATED(x), 0.0f)); }  // rounded

__device__ __forceinline__ u32 gated(u32 gate, u32 value) {
    return packed(activated(low(gate)) * low(value), activated(high(gate)) * high(value));
}

template <int OWN>
__device__ __forceinline__ void multiply(
    u32 ring, const u64* full, const u64* empty, unsigned short* out, int group, int rows, int turns, int outputs) {
    const int thread = threadIdx.x % 128, tiles = group * EACH;
    float sums[OWN][WIDTH / 2];
#pragma unroll
    for (int tile = 0; tile < OWN; ++tile)
#pragma unroll
        for (int i = 0; i < WIDTH / 2; ++i) sums[tile][i] = 0.0f;
    u32 stage = 0, phase = 0;
    for (int turn = 0; turn < turns; ++turn) {
        wait(shared(full + stage), phase);
        const u32 at = ring + stage * BYTES;
        const u64 left = matrix(at + tiles * (64 * SPAN * 2)), right = matrix(at + X_BYTES);
        begin_products();
#pragma unroll
        for (int k = 0; k < SPAN / 16; ++k)
#pragma unroll
            for (int tile = 0; tile < OWN; ++tile)
                add_wide_product(sums[tile], left + tile * (64 * SPAN * 2 >> 4) + 2 * k, right + 2 * k);
        end_of_products();
        wait_for_products<1>();
        // All but these products are done: the stage before can be filled again, if it will be. Nobody is told of more,
        // so that whoever was told has waited for it, and is not gone.
        if (turn > 0 && turn - 1 + STAGES < turns && thread < CLUSTER)
            arrive(shared(empty + (stage == 0 ? STAGES : stage) - 1), thread);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
    wait_for_products<0>();
#pragma unroll
    for (int tile = 0; tile < OWN; ++tile) not_used_before(sums[tile]);
    const int row = tiles * 64 + thread / 32 * 16 + thread % 32 / 4;
    const int column = blockIdx.x * (WIDTH / 2) + thread % 4 * 2;
#pragma unroll
    for (int tile = 0; tile < OWN; ++tile)
#pragma unroll
        for (int i = 0; i < WIDTH / 8; ++i) {  // two neighbours at a time
            const int here = row + tile * 64 + i % 2 * 8, at = column + i / 2 * 8;
            const float *gate = sums[tile] + 2 * i, *value = gate + WIDTH / 4;
            const u32 both = gated(packed(gate[0], gate[1]), packed(value[0], value[1]));
            if (here < rows && at < outputs) *(u32*)(out + (u64)here * outputs + at) = both;
        }
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(GROUPS * 128 + 128, 1)
wide(const __grid_constant__ Map x, const __grid_constant__ Map weight, unsigned short* out, int rows, int inputs,
     int outputs) {
    extern __shared__ __align__(1024) unsigned char room[];
    __shared__ u64 full[STAGES], empty[STAGES];
    const int turns = (inputs + SPAN - 1) / SPAN, group = threadIdx.x / 128;
    const u32 ring = shared(room);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            init(shared(full + stage), 1);
            init(shared(empty + stage), CLUSTER * GROUPS);
        }
        end_of_init();
    }
    cluster_is_here();
    if (group == GROUPS) {
        have_registers<false, 24>();
        if (threadIdx.x % 128 == 0) {
            const int first = blockIdx.x * (WIDTH / 2);
            u32 stage = 0, phase = 1;
            const u32 part = block_of_cluster() * (ROWS / CLUSTER);  // the rows that it fetches
            for (int turn = 0; turn < min(turns, STAGES); ++turn)  // nothing before this launch has written weights
                fetch_weights(ring + turn * BYTES, &weight, turn, first, outputs, shared(full + turn));
            wait_for_launch_before();
            for (int turn = 0; turn < turns; ++turn) {
                const u32 barrier = shared(full + stage), to = ring + stage * BYTES;
                if (turn >= STAGES) {
                    wait(shared(empty + stage), phase);
                    fetch_weights(to, &weight, turn, first, outputs, barrier);
                }
                fetch_for_all<CLUSTER>(to + part * (SPAN * 2), &x, turn * SPAN, part, barrier, STAYS);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        __syncwarp();
    } else if (group < GROUPS - 1) {
        have_registers<(WHOLE > ENTRY), WHOLE>();
        multiply<EACH>(ring, full, empty, out, group, rows, turns, outputs);
    } else {
        have_registers<(LAST > ENTRY), LAST>();
        multiply<TILES - EACH * (GROUPS - 1)>(ring, full, empty, out, group, rows, turns, outputs);
    }
    cluster_is_here();  // shared memory that others see is there until all are done
}
