// What keys and queries see of states that lag behind, where there are many rows: the same as `_look` of seen.py, whose
// words these are; for late.cu, which says what is defined where this is compiled.
//
// There a warp has pieces of a state come to its registers, and all that these meet; there are too few of them for
// memory to be busy while it multiplies. Here all comes to shared memory: as soon as a piece has been seen, another is on
// its way to its place, of the same state or of the next. States are seen as they were read. What is owed is seen through
// recorded keys, as far as these meet what is asked, once for a head; a piece is moved on by it only where it is stored.

typedef unsigned short bf16;

constexpr int PIECES = DK / PIECE, TILES = (2 * EACH + 7) / 8, K_STEP = HEADS / GROUP * DK, WARPS = DV / 32;
constexpr int MET = (TILES + 1) / 2;  // tiles of 16 vectors, keys and queries
constexpr int TURNS = OWED / 4, EIGHTS = OWED / 8;  // in which recorded tokens come
static_assert(PIECE == 32 && DK % (RING * PIECE) == 0 && DV % 32 == 0 && EIGHTS == 2, "see() is for these");

struct Factor { float high[4], low[4]; };  // of 11 bits each: what has more is cut in two

__device__ __forceinline__ void cut(float x, float& high, float& low) {
    high = __uint_as_float(__float_as_uint(x) & 0xFFFFE000);
    low = x - high;
}

__device__ __forceinline__ float value_of(float x) { return x; }
__device__ __forceinline__ float value_of(bf16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ float rounded(float x) { return value_of((bf16)packed(x, 0.0f)); }
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float even(u32 two) { return __uint_as_float(two << 16); }
__device__ __forceinline__ float odd(u32 two) { return __uint_as_float(two & 0xFFFF0000); }
__device__ __forceinline__ float of_four(const uint2& four, int j) {
    const u32 two = j < 2 ? four.x : four.y;
    return j % 2 ? odd(two) : even(two);
}

struct Numbers {  // of a step, and where its tensors are
    const bf16* k;
    i64 to_q;
    const bf16 *v, *z, *a, *b;
    bf16 *out, *keys;
    float *decays, *changes, *states;
    const int *starts, *counts, *reads, *owed_start, *owed, *keeps, *records;
    const float *rate, *bias;
    const WEIGHT* weight;
    i64 q_stride, k_stride, v_stride, z_stride, a_stride, b_stride, slot_stride;
};

struct States {  // where their pieces come from, and what counts that they have come
    const Map* map;
    const u64* full;
};

struct Work {  // a head of a row
    int head, count, source, target, tokens, start, owed_start, record;
};

// Shared memory: of each piece 32 rows of the state, as slices of 32 columns; then of each piece recorded keys, and what is
// asked at these rows; of two heads that follow each other changes and decays, values and what opens; gates; what has been
// seen; by warps squares of answers, and what is left of changes; and rates, biases and weights of the layer. In bytes.
constexpr int SLICE = PIECE * 128, STATE = WARPS * SLICE;
constexpr int ASKED = OWED * OLD_STEP, TOKENS = ASKED + TILES * 8 * 64;
constexpr int DECAYS = OWED * DV * 4, BROUGHT = DECAYS + OWED * 4, VECTOR = DV * 2, OWN_STEP = BROUGHT + 2 * EACH * VECTOR;
constexpr int SEEN_STEP = DV * 4 + 16;  // so that threads that write at a time find different banks
constexpr int LEFT_STEP = OWED * 4 + 16;
constexpr int OLD = RING * STATE, OWN = OLD + RING * TOKENS, GATES = OWN + 2 * OWN_STEP, SEEN = GATES + (EACH + 1) / 2 * 16;
constexpr int SQUARES = SEEN + TILES * 8 * SEEN_STEP, LEFT = SQUARES + EACH * WARPS * 4, LAYER = LEFT + WARPS * LEFT_STEP;
static_assert(LAYER + (2 * HEADS + DV) * 4 == ALL_BYTES, "late.py asks for another size");

// Which recorded token a thread has of four: sums of products have them two by two, and factors take them so.
__device__ __forceinline__ int token_of(int turn, int inner) { return turn / 2 * 8 + inner * 2 + turn % 2; }

__device__ __forceinline__ void meet(float (&to)[4], const uint4& near, const uint4& far, const uint4& others) {
    add_product(to, {near.x, far.x, near.y, far.y}, others.x, others.y);
    add_product(to, {near.z, far.z, near.w, far.w}, others.z, others.w);
}

__device__ __forceinline__ Work work_at(const Numbers& of, int which, int all) {
    Work work = {which % HEADS, 0, -1, -1};
    if (which >= all) return work;  // there is none
    const int row = which / HEADS;
    work.count = of.counts[row], work.source = of.reads[row], work.target = of.keeps[row], work.tokens = of.owed[row];
    work.start = of.starts[row], work.owed_start = of.owed_start[row], work.record = of.records[row];
    return work;
}

// What no launch of this step has written of a piece: the state, and what is owed.
__device__ __forceinline__ void fetch_old(
    const Numbers& of, const States& from, const Work& work, u32 memory, int piece, int turn) {
    const int first_row = work.head * DK + piece * PIECE, in_key = work.head / GROUP * DK + piece * PIECE;
    if (threadIdx.x == DV - 32) {
        const u32 barrier = shared(from.full + piece % RING), to = memory + piece % RING * STATE;
        // What is only seen goes first out of the second-level cache, so that all else stays there; what is stored again
        // does not, since it is written where it was read. Where there is no slot zeros come.
        const Hint hint = work.target < 0 ? GOES : USUAL;
        expect(barrier, work.count ? STATE : 0);
        if (work.count)
            for (int i = 0; i < WARPS; ++i)
                fetch(to + i * SLICE, from.map, {i * 32, 0, first_row / 8, 0, work.source}, barrier, hint);
    }
    if (!work.count) return;
#pragma unroll
    for (int first = 0; first < OWED * 4; first += DV) {
        const int i = first + threadIdx.x, token = i / 4;
        if (i >= OWED * 4) break;
        const bf16* key = of.keys + (i64)(work.owed_start + token) * K_STEP + in_key + i % 4 * 8;
        const bool there = token < work.tokens;
        copy(memory + OLD + piece % RING * TOKENS + token * OLD_STEP + i % 4 * 16, there ? key : of.keys, there);
    }
    if (piece > 0) return;
    const u32 own = memory + OWN + turn % 2 * OWN_STEP;
    const int chunk = threadIdx.x % (DV / 4), row = threadIdx.x / (DV / 4);
    const float* changes = of.changes + ((i64)work.owed_start * HEADS + work.head) * DV + chunk * 4;
#pragma unroll
    for (int token = row; token < OWED; token += 4)
        copy(own + token * DV * 4 + chunk * 16, token < work.tokens ? changes + (i64)token * HEADS * DV : of.changes,
             token < work.tokens);
    if (threadIdx.x < OWED) {
        const bool there = threadIdx.x < work.tokens;
        const float* decay = of.decays + (there ? (work.owed_start + threadIdx.x) * HEADS + work.head : 0);
        copy_number(own + DECAYS + threadIdx.x * 4, decay, there);
    }
}

// What this step's tokens bring to a piece: keys and queries; and with the first one values and gates. Ends a group.
__device__ __forceinline__ void fetch_new(const Numbers& of, const Work& work, u32 memory, int piece, int turn) {
    if (work.count) {
        const u32 asked = memory + OLD + piece % RING * TOKENS + ASKED;
        const u32 brought = memory + OWN + turn % 2 * OWN_STEP + BROUGHT;
#pragma unroll
        for (int first = 0; first < TILES * 8 * 4; first += DV) {
            const int i = first + (threadIdx.x + DV / 2) % DV;  // others than those that fetch recorded keys
            const int vector = i / 4, token = vector < EACH ? vector : vector - EACH;
            if (i >= TILES * 8 * 4) break;
            const bool there = vector < 2 * EACH && token < work.count;
            const bf16* from = of.k + work.start * of.k_stride + work.head / GROUP * DK + piece * PIECE + i % 4 * 8;
            from += vector < EACH ? token * of.k_stride : token * of.q_stride + of.to_q;
            copy(asked + vector * 64 + i % 4 * 16, there ? from : of.k, there);
        }
        if (piece == 0)
#pragma unroll
            for (int first = 0; first < 2 * EACH * DV / 8; first += DV) {
                const int i = first + threadIdx.x, vector = i / (DV / 8), chunk = i % (DV / 8);
                const int token = vector < EACH ? vector : vector - EACH;
                if (i >= 2 * EACH * DV / 8) break;
                const i64 row = work.start + token;
                const bf16* from = vector < EACH ? of.v + row * of.v_stride : of.z + row * of.z_stride;
                const bool there = token < work.count;
                copy(brought + i * 16, there ? from + work.head * DV + chunk * 8 : of.v, there);
            }
    }
    end_of_group();
}

// Each thread takes eight rows of a piece that follow each other. Where the same ones of four threads are, which read at a
// time, lines lie in different banks: that is how pieces are fetched, and swizzled.
__device__ __forceinline__ u32 row_at(u32 from, int row) { return (from ^ row % 2 * 16) + row / 2 * 1024 + row % 2 * 128; }

// What is left of each change after those behind it, and last what is left of the state, for the threads of a warp. Sums
// are of their own: differences would lose the digits of weak decays.
__device__ __forceinline__ void put_left(u32 left, u32 own, int lane) {
    float decay = 0.0f;
    if (lane < OWED) decay = shared_at<float>(own + DECAYS + lane * 4);
    float after = __shfl_down_sync(0xFFFFFFFF, decay, 1);
    if (lane == 31) after = 0.0f;
#pragma unroll
    for (int far = 1; far < 32; far *= 2) {
        const float other = __shfl_down_sync(0xFFFFFFFF, after, far);
        if (lane + far < 32) after += other;
    }
    if (lane < OWED) to_shared(left + lane * 4, __expf(after));
    if (lane == 0) to_shared(left + OWED * 4, __expf(after + decay));
    __syncwarp();
}

// Changes, each decayed by those after it, by eight tokens and by half of the columns that a thread takes, two next to each
// other.
__device__ __forceinline__ void moving_by(
    u32 left, u32 own, int lane, const int (&columns)[2], Factor (&moving)[EIGHTS][2]) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
        const int token = token_of(turn, lane % 4), at = turn % 2 * 2;
        const float by = shared_at<float>(left + token * 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float2 two = shared_at<float2>(own + (token * DV + columns[half]) * 4);
            Factor& factor = moving[turn / 2][half];
            cut(two.x * by, factor.high[at], factor.low[at]);
            cut(two.y * by, factor.high[at + 1], factor.low[at + 1]);
        }
    }
}

// What is seen of a piece of a state as it was read; and how keys and queries meet one another, and recorded keys. What
// comes from shared memory by two numbers is as it must lie in registers.
__device__ __forceinline__ void see(
    u32 state, u32 brought, int lane, int tokens, float (&seen)[2][TILES][4], float (&met)[MET][TILES][4],
    float (&old)[MET][EIGHTS][4], bf16* keys, int count) {
    const int quad = lane / 4, inner = lane % 4;
    const u32 from = state + inner * 256 + (quad / 2 ^ inner * 2) * 16 + quad % 2 * 8;
    uint4 asked[TILES];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
        asked[tile] = shared_at<uint4>(brought + ASKED + (tile * 8 + quad) * 64 + inner * 16);
#pragma unroll
    for (int row = 0; row < MET; ++row) {
        const uint4 near = asked[2 * row], far = 2 * row + 1 < TILES ? asked[2 * row + 1] : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) meet(met[row][tile], near, far, asked[tile]);
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight)
            if (const u32 key = brought + (eight * 8 + quad) * OLD_STEP; eight * 8 < tokens)
                meet(old[row][eight], near, far, shared_at<uint4>(key + inner * 16));
    }
    if (keys)
#pragma unroll
        for (int tile = 0; tile * 8 < EACH; ++tile)
            if (tile * 8 + quad < count) *(uint4*)(keys + (tile * 8 + quad) * K_STEP + inner * 8) = asked[tile];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 at = from ^ half * 64;
            const float2 even = shared_at<float2>(row_at(at, j)), odd = shared_at<float2>(row_at(at, j + 4));
            const float now[4] = {even.x, even.y, odd.x, odd.y};
            Factor factor;
#pragma unroll
            for (int i = 0; i < 4; ++i) cut(now[i], factor.high[i], factor.low[i]);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                const float first = of_four(make_uint2(asked[tile].x, asked[tile].y), j);
                const float second = of_four(make_uint2(asked[tile].z, asked[tile].w), j);
                add_product(seen[half][tile], factor.high, first, second);
                add_product(seen[half][tile], factor.low, first, second);
            }
        }
    }
}

// A piece of a state goes where it is kept, moved on by what is owed.
__device__ __forceinline__ void store(
    u32 state, u32 brought, u32 left, u32 own, int slice, int lane, float* to) {
    const int quad = lane / 4, inner = lane % 4, column = slice + quad * 4;
    const u32 from = state + inner * 256 + (quad ^ inner * 2) * 16;
    Factor moving[EIGHTS][2];
    const float all_left = shared_at<float>(left + OWED * 4);
    moving_by(left, own, lane, {column, column + 2}, moving);
    uint2 old[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn)
        old[turn] = shared_at<uint2>(brought + token_of(turn, inner) * OLD_STEP + quad * 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float4 even = shared_at<float4>(row_at(from, j)), odd = shared_at<float4>(row_at(from, j + 4));
        float now[2][4] = {{even.x, odd.x, even.y, odd.y}, {even.z, odd.z, even.w, odd.w}};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sum[4] = {};
#pragma unroll
            for (int eight = 0; eight < EIGHTS; ++eight) {
                const float first = of_four(old[eight * 2], j), second = of_four(old[eight * 2 + 1], j);
                add_product(sum, moving[eight][half].high, first, second);
                add_product(sum, moving[eight][half].low, first, second);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) now[half][i] = now[half][i] * all_left + sum[i];
        }
        float* at = to + (inner * 8 + j) * DV + column;
        *(float4*)at = make_float4(now[0][0], now[0][2], now[1][0], now[1][2]);
        *(float4*)(at + 4 * DV) = make_float4(now[0][1], now[0][3], now[1][1], now[1][3]);
    }
}

// What was seen of a state as it was read becomes what is seen of it after what is owed: recorded changes are seen as far
// as their keys meet what is asked.
__device__ __forceinline__ void move_on(
    u32 left, u32 own, int lane, const int (&columns)[2], int tokens, const float (&old)[MET][EIGHTS][4],
    float (&seen)[2][TILES][4]) {
    Factor moving[EIGHTS][2];
    const float all_left = shared_at<float>(left + OWED * 4);
    moving_by(left, own, lane, columns, moving);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 8; ++i) seen[i / 4][tile][i % 4] *= all_left;
#pragma unroll
        for (int eight = 0; eight < EIGHTS; ++eight) {
            if (eight * 8 >= tokens) break;
            float high[2], low[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) cut(old[tile / 2][eight][tile % 2 * 2 + i], high[i], low[i]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                add_product(seen[half][tile], moving[eight][half].high, high[0], high[1]);
                add_product(seen[half][tile], moving[eight][half].low, high[0], high[1]);
                add_product(seen[half][tile], moving[eight][half].high, low[0], low[1]);
            }
        }
    }
}
