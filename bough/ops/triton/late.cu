// The gated delta rule for many rows whose slots lag behind, and the norm after it: the same as `_look` and `_say` of
// seen.py. A block takes heads of rows, one after another, and each of its warps 32 columns of them. So it has all that a
// head has seen (seen.cuh), and says what follows while the next state comes.
//
// Defined where this is compiled: HEADS, GROUP (of them to a key head), DK, DV, EACH (tokens of a row at the most), OWED,
// RING (pieces of PIECE rows that are there or on their way), OLD_STEP, EPS of the norm, WEIGHT (the type of its weights),
// LENGTH_EPS of keys and queries, how many BLOCKS a processor has room for, and ALL_BYTES of shared memory of one.

// What a thread's token says of its gates: two numbers, as they are.
__device__ __forceinline__ u32 raw_gates(const Numbers& of, const Work& work) {
    if (threadIdx.x >= work.count) return 0;
    const i64 token = work.start + threadIdx.x;
    return of.a[token * of.a_stride + work.head] | (u32)of.b[token * of.b_stride + work.head] << 16;
}

// Of each token the log decay, and the size of its step.
__device__ __forceinline__ void put_gates(u32 memory, int head, u32 raw) {
    if (threadIdx.x >= EACH) return;
    const float x = even(raw) + shared_at<float>(memory + LAYER + (HEADS + head) * 4);
    const float decay = shared_at<float>(memory + LAYER + head * 4) * (x > 20.0f ? x : log1pf(__expf(x)));
    to_shared(memory + GATES + threadIdx.x * 8, make_float2(decay, rounded(sigmoid(odd(raw)))));
}

// How a vector meets another: tokens' keys come first, then their queries.
__device__ __forceinline__ float met_by(const float (&met)[MET][TILES][4], int one, int other) {
    return __shfl_sync(0xFFFFFFFF, met[one / 16][other / 8][one % 16 / 8 * 2 + other % 2], one % 8 * 4 + other % 8 / 2);
}

// What tokens change and answer, by a thread for each column; and what comes of answers by the norm.
__device__ __forceinline__ void say(
    const Numbers& of, const Work& work, u32 memory, u32 own, const float (&met)[MET][TILES][4]) {
    const int column = threadIdx.x, lane = column % 32, warp = column / 32;
    float* changes = of.changes + ((i64)work.record * HEADS + work.head) * DV + column;
    const u32 brought = own + BROUGHT + column * 2, seen = memory + SEEN + column * 4;
    float moves[EACH], remain[EACH], answers[EACH], total = 1.0f;
#pragma unroll
    for (int t = 0; t < EACH; ++t) {
        const float2 gates = shared_at<float2>(memory + GATES + t * 8);
        const float decay = __expf(gates.x);
        total *= decay;
        float of_state = shared_at<float>(seen + t * SEEN_STEP) * total;
        float answer = shared_at<float>(seen + (EACH + t) * SEEN_STEP) * total;
#pragma unroll
        for (int s = 0; s < t; ++s) {
            remain[s] *= decay;
            of_state += moves[s] * (remain[s] * met_by(met, s, t));
            answer += moves[s] * (remain[s] * met_by(met, s, EACH + t));
        }
        const float length = rsqrtf(met_by(met, t, t) + LENGTH_EPS);
        moves[t] = (value_of(shared_at<bf16>(brought + t * VECTOR)) - of_state * length) * (gates.y * length);
        remain[t] = 1.0f;
        answer += moves[t] * met_by(met, t, EACH + t);
        answers[t] = rounded(answer * (rsqrtf(met_by(met, EACH + t, EACH + t) + LENGTH_EPS) * rsqrtf(DK)));
        if (t < work.count) changes[(i64)t * HEADS * DV] = moves[t];
    }
    if (column < work.count)
        of.decays[(work.record + column) * HEADS + work.head] = shared_at<float>(memory + GATES + column * 8);
#pragma unroll
    for (int t = 0; t < EACH; ++t) {
        float square = answers[t] * answers[t];
#pragma unroll
        for (int far = 16; far > 0; far /= 2) square += __shfl_xor_sync(0xFFFFFFFF, square, far);
        if (lane == 0) to_shared(memory + SQUARES + (t * WARPS + warp) * 4, square);
    }
    __syncthreads();
    const float weight = shared_at<float>(memory + LAYER + (2 * HEADS + column) * 4);
    bf16* out = of.out + ((i64)work.start * HEADS + work.head) * DV + column;
#pragma unroll
    for (int t = 0; t < EACH; ++t) {
        float square = 0.0f;
#pragma unroll
        for (int each = 0; each < WARPS; ++each) square += shared_at<float>(memory + SQUARES + (t * WARPS + each) * 4);
        const float gate = value_of(shared_at<bf16>(brought + (EACH + t) * VECTOR));
        const float normed = rounded(rounded(answers[t] * rsqrtf(square / DV + EPS)) * weight);
        if (t < work.count) out[(i64)t * HEADS * DV] = (bf16)packed(normed * gate * sigmoid(gate), 0.0f);
    }
}

extern "C" __global__ void __launch_bounds__(DV, BLOCKS)
late(const __grid_constant__ Map map, const Numbers of, int all) {
    extern __shared__ __align__(1024) unsigned char room[];
    __shared__ u64 full[RING];
    const States from = {&map, full};
    const u32 memory = shared(room);
    const int lane = threadIdx.x % 32, quad = lane / 4, inner = lane % 4, slice = threadIdx.x / 32 * 32;
    const int columns[2] = {slice + quad * 2, slice + 16 + quad * 2};
    const u32 left = memory + LEFT + slice / 32 * LEFT_STEP;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < RING; ++slot) init(shared(full + slot), 1);
        end_of_init();
    }
#pragma unroll 1
    for (int head = threadIdx.x; head < HEADS; head += DV) {
        to_shared(memory + LAYER + head * 4, of.rate[head]);
        to_shared(memory + LAYER + (HEADS + head) * 4, of.bias[head]);
    }
    to_shared(memory + LAYER + (2 * HEADS + threadIdx.x) * 4, value_of(of.weight[threadIdx.x]));
    __syncthreads();
    int which = blockIdx.x, turn = 0;
    Work work = work_at(of, which, all);
#pragma unroll
    for (int piece = 0; piece < RING; ++piece) fetch_old(of, from, work, memory, piece, turn);  // while it waits
    wait_for_launch_before();
#pragma unroll
    for (int piece = 0; piece < RING; ++piece) fetch_new(of, work, memory, piece, turn);
    for (; which < all; which += gridDim.x, ++turn) {
        const Work next = work_at(of, which + gridDim.x, all);
        const u32 own = memory + OWN + turn % 2 * OWN_STEP;
        u32 raw = 0;
        float seen[2][TILES][4] = {}, met[MET][TILES][4] = {}, old[MET][EIGHTS][4] = {};
#pragma unroll
        for (int piece = 0; piece < PIECES; ++piece) {
            wait_for_groups<RING - 1>();  // the others may still be on their way
            wait(shared(full + piece % RING), (turn * (PIECES / RING) + piece / RING) % 2);
            __syncthreads();
            const u32 state = memory + piece % RING * STATE + slice / 32 * SLICE;
            const u32 brought = memory + OLD + piece % RING * TOKENS;
            bf16* keys = nullptr;  // which are recorded by one head of a group, by its warps in turn
            if (work.head % GROUP == 0 && slice == piece % WARPS * 32)
                keys = of.keys + (i64)work.record * K_STEP + work.head / GROUP * DK + piece * PIECE;
            if (piece == 0) put_left(left, own, lane);
            if (piece == PIECES - 2) raw = raw_gates(of, work);
            if (piece == PIECES - 1) put_gates(memory, work.head, raw);
            if (work.count) {  // there is such a row
                see(state, brought, lane, work.tokens, seen, met, old, keys, work.count);
                if (work.target >= 0) {
                    float* to = of.states + work.target * of.slot_stride + (i64)work.head * DK * DV;
                    store(state, brought, left, own, slice, lane, to + piece * PIECE * DV);
                }
            }
            __syncthreads();  // all have read it
            const bool mine = piece + RING < PIECES;
            const Work& coming = mine ? work : next;
            fetch_old(of, from, coming, memory, (piece + RING) % PIECES, mine ? turn : turn + 1);
            fetch_new(of, coming, memory, (piece + RING) % PIECES, mine ? turn : turn + 1);
        }
        if (work.count) {
            if (work.tokens) move_on(left, own, lane, columns, work.tokens, old, seen);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
                for (int late = 0; late < 2; ++late)
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const float* two = seen[half][tile] + late;
                        const u32 at = memory + SEEN + (tile * 8 + inner * 2 + late) * SEEN_STEP + columns[half] * 4;
                        to_shared(at, make_float2(two[0], two[2]));
                    }
            __syncwarp();  // each has what was seen of its own columns
            say(of, work, memory, own, met);
        }
        work = next;
    }
}
