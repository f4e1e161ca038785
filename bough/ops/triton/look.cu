// What keys and queries see of states, where there are many rows: the same as `_look` of seen.py, whose words these are.
//
// There a warp has pieces of a state come to its registers, and all that these meet; there are too few of them for
// memory to be busy while it multiplies. Here all comes to shared memory: as soon as a piece has been seen, another is on
// its way to its place, of the same state or of the next. A block takes heads of rows, one after another, and each of its
// warps 32 columns of them.
//
// Defined where this is compiled: HEADS, GROUP (of them to a key head), DK, DV, EACH, OWED, RING (pieces of PIECE rows that are
// there or on their way), OLD_STEP, and how many BLOCKS a processor has room for.

typedef unsigned short bf16;

constexpr int PIECES = DK / PIECE, TILES = (2 * EACH + 7) / 8, K_STEP = HEADS / GROUP * DK;
constexpr int TURNS = OWED / 4, EIGHTS = OWED / 8;  // in which recorded tokens come
static_assert(PIECE == 32 && DK % (RING * PIECE) == 0 && DV % 32 == 0 && EIGHTS == 2, "see() is for these");

struct Factor { float high[4], low[4]; };  // of 11 bits each: what has more is cut in two

__device__ __forceinline__ void cut(float x, float& high, float& low) {
    high = __uint_as_float(__float_as_uint(x) & 0xFFFFE000);
    low = x - high;
}

__device__ __forceinline__ float even(u32 two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float odd(u32 two) { return __uint_as_float(two & 0xFFFF0000); }
__device__ __forceinline__ float of_four(const uint2& four, int j) {
    const u32 two = j < 2 ? four.x : four.y;
    return j % 2 ? odd(two) : even(two);
}

struct Numbers {  // of a step, and where its tensors are
    const bf16* k;
    i64 to_q;
    float* out;
    const bf16* keys;
    const float *decays, *changes;
    float* states;
    const int *starts, *counts, *reads, *owed_start, *owed, *keeps;
    i64 q_stride, k_stride, slot_stride;
};

struct Work {  // a head of a row
    int row, head, count, source, target, tokens;
    i64 start, owed_start;
};

// Shared memory: of each piece 32 rows of the state, as slices of 32 columns, then recorded keys and what is asked at
// these rows; behind all pieces changes and decays.
constexpr int SLICE = PIECE * 128;  // bytes
constexpr int OLD = DV / 32 * SLICE, ASKED = OLD + OWED * OLD_STEP, SLOT = ASKED + TILES * 8 * 64;
constexpr int CHANGES = RING * SLOT, DECAYS = CHANGES + OWED * DV * 4;

__device__ __forceinline__ Work work_at(const Numbers& of, int number, int all) {
    Work work = {number / HEADS, number % HEADS, 0, -1, -1, 0, 0, 0};
    if (number >= all) return work;  // there is none
    work.count = of.counts[work.row];
    work.source = of.reads[work.row], work.target = of.keeps[work.row], work.tokens = of.owed[work.row];
    work.start = of.starts[work.row], work.owed_start = of.owed_start[work.row];
    return work;
}

__device__ __forceinline__ void fetch(const Numbers& of, const Work& work, u32 memory, int piece) {
    if (work.count) {
        const u32 slot = memory + piece % RING * SLOT;
        const int chunk = threadIdx.x % (DV / 4), row = threadIdx.x / (DV / 4);
        const float* from = of.states + (work.source < 0 ? 0 : work.source) * of.slot_stride;
        from += ((i64)work.head * DK + piece * PIECE + row) * DV + chunk * 4;
        const u32 to = slot + chunk / 8 * SLICE + row * 128;
        // What is only seen goes first out of the second-level cache, so that all else stays there; what is stored again
        // does not, since it is written where it was read.
        const Hint hint = work.target < 0 ? GOES : USUAL;
#pragma unroll
        for (int i = 0; i < PIECE / 4; ++i)  // eight threads that read at a time find their rows in different banks
            copy(to + i * 512 + (chunk % 8 ^ i / 2 * 2) * 16, from + i * 4 * DV, work.source >= 0, hint);
        const int first = work.head / GROUP * DK + piece * PIECE;
        for (int i = threadIdx.x; i < (OWED + TILES * 8) * 4; i += DV) {
            if (i < OWED * 4) {
                const int token = i / 4;
                const bf16* key = of.keys + (work.owed_start + token) * K_STEP + first + i % 4 * 8;
                const bool there = token < work.tokens;
                copy(slot + OLD + token * OLD_STEP + i % 4 * 16, there ? key : of.keys, there);
            } else {
                const int vector = i / 4 - OWED, token = vector < EACH ? vector : vector - EACH;
                const bool there = vector < 2 * EACH && token < work.count;
                const bf16* asked = of.k + work.start * of.k_stride + first + i % 4 * 8;
                asked += vector < EACH ? token * of.k_stride : token * of.q_stride + of.to_q;
                copy(slot + ASKED + vector * 64 + i % 4 * 16, there ? asked : of.k, there);
            }
        }
        if (piece == 0) {
            const float* changes = of.changes + (work.owed_start * HEADS + work.head) * DV + chunk * 4;
#pragma unroll
            for (int token = row; token < OWED; token += 4)
                copy(memory + CHANGES + token * DV * 4 + chunk * 16,
                     token < work.tokens ? changes + (i64)token * HEADS * DV : of.changes, token < work.tokens);
            if (threadIdx.x < OWED) {
                const bool there = threadIdx.x < work.tokens;
                const float* decay = of.decays + (there ? (work.owed_start + threadIdx.x) * HEADS + work.head : 0);
                copy_number(memory + DECAYS + threadIdx.x * 4, decay, there);
            }
        }
    }
    end_of_group();
}

// What is left of a state after what is owed; and changes, each decayed by those after it, by eight tokens and by half of
// the columns. Sums are of their own: differences would lose the digits of weak decays.
__device__ __forceinline__ float moving_by(u32 memory, int lane, int column, Factor (&moving)[EIGHTS][2]) {
    float own = 0.0f;
    if (lane < OWED) own = shared_at<float>(memory + DECAYS + lane * 4);
    float after = __shfl_down_sync(0xFFFFFFFF, own, 1), all = own;
    if (lane == 31) after = 0.0f;
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
        const float other = __shfl_down_sync(0xFFFFFFFF, after, far);
        if (lane + far < 32) after += other;
        all += __shfl_xor_sync(0xFFFFFFFF, all, far);
    }
    const float left = __expf(after);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int token = turn * 4 + lane % 4, at = turn % 2 * 2;
        const float by = __shfl_sync(0xFFFFFFFF, left, token);
        const float4 four = shared_at<float4>(memory + CHANGES + (token * DV + column) * 4);
        Factor(&two)[2] = moving[turn / 2];
        cut(four.x * by, two[0].high[at], two[0].low[at]);
        cut(four.y * by, two[0].high[at + 1], two[0].low[at + 1]);
        cut(four.z * by, two[1].high[at], two[1].low[at]);
        cut(four.w * by, two[1].high[at + 1], two[1].low[at + 1]);
    }
    return __expf(all);
}

// A piece of a state, moved on by up to eight tokens that are owed for each of SOME. What is seen of it is added.
template <int SOME>
__device__ __forceinline__ void see(
    u32 slot, int slice, int lane, float* to, bool stored, const Factor (&moving)[EIGHTS][2], float all_left,
    float (&seen)[2][TILES][4]) {
    const int quad = lane / 4, inner = lane % 4;
    const u32 from = slot + slice * PIECE * 4 + inner * 8 * 128 + (quad ^ inner * 2) * 16;
    uint2 old[TURNS];
    uint4 asked[TILES];
#pragma unroll
    for (int turn = 0; turn < SOME * 2; ++turn)
        old[turn] = shared_at<uint2>(slot + OLD + (turn * 4 + inner) * OLD_STEP + quad * 8);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
        asked[tile] = shared_at<uint4>(slot + ASKED + (tile * 8 + quad) * 64 + inner * 16);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float4 even = shared_at<float4>(from + j * 128), odd = shared_at<float4>(from + (j + 4) * 128);
        float now[2][4] = {{even.x, odd.x, even.y, odd.y}, {even.z, odd.z, even.w, odd.w}};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (SOME) {
                float sum[4] = {};
#pragma unroll
                for (int eight = 0; eight < SOME; ++eight) {
                    const float first = of_four(old[eight * 2], j), second = of_four(old[eight * 2 + 1], j);
                    add_product(sum, moving[eight][half].high, first, second);
                    add_product(sum, moving[eight][half].low, first, second);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) now[half][i] = now[half][i] * all_left + sum[i];
            }
            Factor factor;  // a sum as a left factor
#pragma unroll
            for (int i = 0; i < 4; ++i) cut(now[half][i % 2 * 2 + i / 2], factor.high[i], factor.low[i]);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const float first = of_four(make_uint2(asked[tile].x, asked[tile].y), j);
                const float second = of_four(make_uint2(asked[tile].z, asked[tile].w), j);
                add_product(seen[half][tile], factor.high, first, second);
                add_product(seen[half][tile], factor.low, first, second);
            }
        }
        if (stored) {
            *(float4*)(to + j * DV) = make_float4(now[0][0], now[0][2], now[1][0], now[1][2]);
            *(float4*)(to + (j + 4) * DV) = make_float4(now[0][1], now[0][3], now[1][1], now[1][3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(DV, BLOCKS) look(const Numbers of, int all) {
    extern __shared__ __align__(128) unsigned char room[];
    const u32 memory = shared(room);
    const int lane = threadIdx.x % 32, quad = lane / 4, inner = lane % 4, slice = threadIdx.x / 32 * 32;
    const int column = slice + quad * 4;
    int number = blockIdx.x;
    Work work = work_at(of, number, all);
#pragma unroll
    for (int piece = 0; piece < RING; ++piece) fetch(of, work, memory, piece);
    for (; number < all; number += gridDim.x) {
        const Work next = work_at(of, number + gridDim.x, all);
        float* to = of.states + (work.target < 0 ? 0 : work.target) * of.slot_stride;
        to += ((i64)work.head * DK + inner * 8) * DV + column;
        const bool stored = work.target >= 0;
        Factor moving[EIGHTS][2];
        float all_left = 1.0f, seen[2][TILES][4] = {};
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            wait_for_groups<RING - 1>();  // the others may still be on their way
            __syncthreads();
            const u32 slot = memory + piece % RING * SLOT;
            float* put = to + piece * PIECE * DV;
            if (piece == 0) all_left = moving_by(memory, lane, column, moving);
            if (work.count == 0)
                ;  // there is no such row
            else if (work.tokens > 8)
                see<2>(slot, slice, lane, put, stored, moving, all_left, seen);
            else if (work.tokens > 0)
                see<1>(slot, slice, lane, put, stored, moving, all_left, seen);
            else
                see<0>(slot, slice, lane, put, stored, moving, all_left, seen);
            __syncthreads();  // all have read it
            if (piece + RING < PIECES)
                fetch(of, work, memory, piece + RING);
            else
                fetch(of, next, memory, piece + RING - PIECES);
        }
        float* out = of.out + ((i64)work.row * HEADS + work.head) * (2 * EACH * DV) + column;
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int late = 0; late < 2; ++late) {
                const int vector = tile * 8 + inner * 2 + late;
                const float *near = seen[0][tile] + late, *far = seen[1][tile] + late;
                if (work.count && vector < 2 * EACH)
                    *(float4*)(out + vector * DV) = make_float4(near[0], near[2], far[0], far[2]);
            }
        work = next;
    }
}
