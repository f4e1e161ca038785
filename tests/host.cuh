// A device on the host, for kernels in CUDA C++: what stands in ptx.cuh for them, and what C++ lacks of CUDA.
//
// Threads are fibers that take turns in an order drawn anew each time, some warps less often than others. What a thread
// need not wait for, copies and arrivals at barriers elsewhere, is done at once; or, if `late`, when whoever needs it can do
// nothing else, also in a drawn order. So what reads too early, or overwrites what is yet to be read, gives other numbers;
// shared memory is no numbers at first. Waiting that never ends, addresses out of bounds or askew, and what outlasts the
// block that it is for are faults.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <ucontext.h>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ thread_local  // one for all fibers: its address stands for a place in the memory of each block

typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef unsigned short u16;

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { u32 x = 0, y = 0, z = 0; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
To as(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &x, sizeof to);
    return to;
}
inline float __uint_as_float(u32 x) { return as<float>(x); }
inline u32 __float_as_uint(float x) { return as<u32>(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
using std::min;

namespace host {

constexpr const char* OUTLASTED = "a block has ended before what is for it was done";
constexpr u32 ROOM = 227 << 10, BESIDE = 1 << 16;  // bytes of shared memory that a launch asks for, and of named variables

struct Told {
    void** arguments;
    u32 blocks, threads, cluster, bytes, seed, late, ranges;
    const uint8_t** range;  // where numbers may be copied from: begins and ends
    void* awaited;          // what the launch before writes last: these bytes
    const void* written;
    u64 awaited_bytes;
};

struct Meeting { u32 arrived = 0, turn = 0; };
struct Warp { Meeting meeting; uint8_t given[2][32][32]; bool slow, rests; };
struct Barrier { u32 expected = 0, pending = 0, phase = 0; i64 bytes = 0; };
using Work = std::function<void()>;
struct Product { float* sums; u64 left, right; };

struct Block {
    u32 index, rank, alive;
    std::vector<uint8_t> memory;
    std::vector<Warp> warps;
    std::vector<Meeting> groups;  // of four warps
    Meeting all;
    std::map<u32, Barrier> barriers;
};

struct Fiber {
    Block* block;
    u32 thread, exchanges = 0;
    bool done = false;
    std::unique_ptr<uint8_t[]> stack;
    ucontext_t context;
    std::deque<std::vector<Work>> copies{1};  // groups, of which the last is open
    std::deque<std::vector<Product>> products{1};
};

inline Told told;
inline Work kernel;
inline std::vector<std::unique_ptr<Block>> cluster;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<Work> under_way;  // what no thread does
inline Meeting everybody;
inline Fiber* now;
inline ucontext_t turns;
inline u64 progress;
inline bool begun;  // whether the launch before has ended
inline std::string fault;
inline std::mt19937 dice;

// Something for a block that no thread waits for by itself.
inline void later(Block& block, Work work) {
    auto checked = [&block, work] {
        if (block.alive) work();
        else if (fault.empty()) fault = OUTLASTED;
    };
    if (told.late) under_way.push_back(checked);
    else checked();
}

inline void leave() { swapcontext(&now->context, &turns); }

inline void expect_that(bool holds, const char* otherwise) {
    if (holds) return;
    if (fault.empty()) fault = otherwise;
    for (;;) leave();  // and is not come back to
}

template <typename Condition>
void until(Condition holds) {
    while (!holds()) leave();
    ++progress;
}

inline void meet(Meeting& meeting, u32 many) {
    const u32 turn = meeting.turn;
    if (++meeting.arrived == many) meeting.arrived = 0, ++meeting.turn, ++progress;
    else until([&] { return meeting.turn != turn; });
}

inline uint8_t* place(Block& block, u32 at, u32 bytes, u32 alignment) {
    const bool named = at >= ROOM && at + bytes <= block.memory.size();
    expect_that(named || at + bytes <= told.bytes, "shared memory is reached past its end");
    expect_that(at % alignment == 0, "shared memory is reached askew");
    return block.memory.data() + at;
}

inline void expect_in_range(const void* from, u64 bytes) {
    const uint8_t* at = (const uint8_t*)from;
    bool inside = false;
    for (u32 i = 0; i < told.ranges; ++i) inside |= told.range[2 * i] <= at && at + bytes <= told.range[2 * i + 1];
    expect_that(inside, "numbers are copied from where there are none");
}

// What each thread of a warp gives, for all of them.
template <typename Given>
std::vector<Given> exchanged(const Given& given) {
    static_assert(sizeof given <= 32);
    Warp& warp = now->block->warps[now->thread / 32];
    auto& room = warp.given[now->exchanges++ % 2];  // who is ahead writes the other one
    memcpy(room[now->thread % 32], &given, sizeof given);
    meet(warp.meeting, 32);
    std::vector<Given> all(32);
    for (u32 lane = 0; lane < 32; ++lane) memcpy(&all[lane], room[lane], sizeof given);
    return all;
}

inline void begin() {
    kernel();
    now->done = true, --now->block->alive;
    ++progress;
    for (;;) leave();
}

inline void make_fiber(Block* block, u32 thread) {
    constexpr size_t STACK = 1 << 16;
    auto fiber = std::make_unique<Fiber>();
    fiber->block = block, fiber->thread = thread, fiber->stack = std::make_unique<uint8_t[]>(STACK);
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = fiber->stack.get(), fiber->context.uc_stack.ss_size = STACK;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, begin, 0);
    fibers.push_back(std::move(fiber));
}

inline void run_cluster(u32 first) {
    cluster.clear(), fibers.clear(), everybody = {};
    for (u32 rank = 0; rank < told.cluster; ++rank) {
        cluster.push_back(std::make_unique<Block>());
        Block& block = *cluster.back();
        block.index = first + rank, block.rank = rank, block.alive = told.threads;
        block.memory.assign(ROOM + 2 * BESIDE, 0xFF);
        block.warps.resize(told.threads / 32), block.groups.resize((told.threads + 127) / 128);
        for (Warp& warp : block.warps) warp.slow = dice() % 2;
        for (u32 thread = 0; thread < told.threads; ++thread) make_fiber(&block, thread);
    }
    std::vector<Fiber*> order;
    for (auto& fiber : fibers) order.push_back(fiber.get());
    bool all = false;  // whether no warp rests
    while (!order.empty() && fault.empty()) {
        const u64 before = progress;
        for (auto& block : cluster)
            for (Warp& warp : block->warps) warp.rests = !all && warp.slow && dice() % 16;
        std::shuffle(order.begin(), order.end(), dice);
        for (Fiber* fiber : order) {
            if (fiber->block->warps[fiber->thread / 32].rests) continue;
            now = fiber;
            swapcontext(&turns, &fiber->context);
            if (!fault.empty()) return;
        }
        order.erase(std::remove_if(order.begin(), order.end(), [](Fiber* each) { return each->done; }), order.end());
        if (progress != before || !all) { all = progress == before; continue; }
        if (under_way.empty()) { fault = "all wait for one another"; return; }
        std::swap(under_way[dice() % under_way.size()], under_way.back());
        const Work work = under_way.back();
        under_way.pop_back(), work();
    }
    if (!under_way.empty()) fault = OUTLASTED;
}

template <typename... Arguments, size_t... I>
void call(void (*of)(Arguments...), std::index_sequence<I...>) {
    of(*(std::remove_cv_t<Arguments>*)told.arguments[I]...);
}

template <typename... Arguments>
const char* run(void (*of)(Arguments...), const Told& given) {
    told = given, fault.clear(), under_way.clear(), dice.seed(given.seed), begun = false;
    kernel = [of] { call(of, std::index_sequence_for<Arguments...>()); };
    for (u32 first = 0; first < told.blocks && fault.empty(); first += told.cluster) run_cluster(first);
    return fault.empty() ? nullptr : fault.c_str();
}

inline dim3 thread_index() { return {now->thread, 0, 0}; }
inline dim3 block_index() { return {now->block->index, 0, 0}; }
inline dim3 grid() { return {told.blocks, 1, 1}; }

}  // namespace host

#define threadIdx host::thread_index()
#define blockIdx host::block_index()
#define gridDim host::grid()

thread_local __align__(1024) unsigned char room[host::ROOM];

inline u32 shared(const void* at) {
    const i64 far = (const uint8_t*)at - room;
    host::expect_that(-(i64)host::BESIDE < far && far < host::ROOM + host::BESIDE, "this is no shared memory");
    return far >= 0 ? (u32)far : (u32)(far + host::ROOM + 2 * host::BESIDE);
}

inline void __syncthreads() { host::meet(host::now->block->all, host::told.threads); }
inline void __syncwarp() { host::exchanged(0); }
inline float __shfl_sync(u32, float x, int lane) { return host::exchanged(x)[lane]; }
inline float __shfl_xor_sync(u32, float x, int far) { return host::exchanged(x)[host::now->thread % 32 ^ far]; }
inline float __shfl_down_sync(u32, float x, int far) {
    const u32 lane = host::now->thread % 32 + far;
    return host::exchanged(x)[lane < 32 ? lane : host::now->thread % 32];
}

enum Hint : u64 { USUAL, STAYS, GOES };

// Copies by threads.

inline void copy_bytes(u32 to, const void* from, bool there, u32 bytes) {
    uint8_t* place = host::place(*host::now->block, to, bytes, bytes);
    if (there) host::expect_in_range(from, bytes);
    host::expect_that(!there || (u64)from % bytes == 0, "numbers are copied from askew");
    auto make = [=] {
        if (there) memcpy(place, from, bytes);
        else memset(place, 0, bytes);
    };
    if (host::told.late) host::now->copies.back().push_back(make);
    else make();
}
inline void copy(u32 to, const void* from, bool there) { copy_bytes(to, from, there, 16); }
inline void copy_number(u32 to, const float* from, bool there) { copy_bytes(to, from, there, 4); }
inline void end_of_group() { host::now->copies.emplace_back(); }
template <int MOST>
void wait_for_groups() {
    auto& groups = host::now->copies;
    for (; groups.size() > MOST + 1; groups.pop_front())
        for (auto& copy : groups.front()) copy();
}
template <typename Many>
Many shared_at(u32 at) {
    Many x;
    memcpy(&x, host::place(*host::now->block, at, sizeof x, sizeof x), sizeof x);
    return x;
}

template <typename Many>
void to_shared(u32 at, Many x) {
    memcpy(host::place(*host::now->block, at, sizeof x, sizeof x), &x, sizeof x);
}

// Copies by the unit for them, and barriers.

struct alignas(64) Map { u64 at, strides[4]; u32 sizes[5], box[5], dims, bytes; char rest[40]; };

inline host::Barrier& barrier_at(host::Block& block, u32 at) {
    host::place(block, at, 8, 8);
    return block.barriers[at];
}
inline void look_at(host::Barrier& barrier) {
    ++host::progress;
    if (!barrier.pending && !barrier.bytes) barrier.pending = barrier.expected, barrier.phase ^= 1;
}
inline void init(u32 at, u32 arrivals) { barrier_at(*host::now->block, at) = {arrivals, arrivals}; }
inline void end_of_init() {}
inline void arrive_at(host::Barrier& barrier) {
    if (barrier.pending > 0) --barrier.pending, look_at(barrier);
    else host::fault = "more arrive at a barrier than it expects";
}
inline void arrive(u32 at, u32 block) {
    host::Barrier& barrier = barrier_at(*host::cluster[block], at);
    host::later(*host::cluster[block], [&barrier] { arrive_at(barrier); });
}
inline void expect(u32 at, u32 bytes) {
    host::Barrier& barrier = barrier_at(*host::now->block, at);
    barrier.bytes += bytes, arrive_at(barrier);
}
inline void wait(u32 at, u32 phase) {
    const host::Barrier& barrier = barrier_at(*host::now->block, at);
    host::until([&] { return barrier.phase != phase; });
}
inline u32 swizzled(u32 at) { return at ^ (at >> 7 & 7) << 4; }
inline void fetch_to(host::Block& block, u32 to, const Map* from, std::vector<int> first, u32 at) {
    const Map map = *from;
    const u32 line = map.box[0] * map.bytes;
    u32 lines = 1;
    for (u32 dim = 1; dim < map.dims; ++dim) lines *= map.box[dim];
    host::expect_that(line == 128 && to % 1024 == 0, "a box lies askew");
    host::place(block, to, line * lines, 1024);
    // Where a line begins that is so many behind the first of a box; null: outside.
    auto begin = [=](u32 behind) {
        const uint8_t* where = (const uint8_t*)map.at;
        for (u32 dim = 1; dim < map.dims; behind /= map.box[dim++]) {
            const i64 here = first[dim] + behind % map.box[dim];
            if (here < 0 || here >= map.sizes[dim]) return (const uint8_t*)nullptr;
            where += here * map.strides[dim - 1];
        }
        return where;
    };
    const i64 width = std::min<i64>(map.box[0], (i64)map.sizes[0] - first[0]);
    for (u32 y = 0; y < lines; ++y)
        if (const uint8_t* where = begin(y)) host::expect_in_range(where + (u64)first[0] * map.bytes, width * map.bytes);
    host::Barrier* barrier = &barrier_at(block, at);
    host::later(block, [=, &block] {
        for (u32 y = 0; y < lines; ++y)
            for (u32 x = 0; x < line; x += 2) {
                const uint8_t* where = begin(y);
                const bool there = where && x < width * map.bytes;
                const u16 number = there ? *(const u16*)(where + first[0] * map.bytes + x) : 0;
                memcpy(block.memory.data() + swizzled(to + y * line + x), &number, 2);
            }
        barrier->bytes -= line * lines, look_at(*barrier);
    });
}
inline void fetch(u32 to, const Map* map, int input, int row, u32 barrier, Hint) {
    fetch_to(*host::now->block, to, map, {input, row}, barrier);
}
inline void fetch(u32 to, const Map* map, const int (&at)[5], u32 barrier, Hint) {
    fetch_to(*host::now->block, to, map, {at, at + 5}, barrier);
}
template <int MANY>
void fetch_for_all(u32 to, const Map* map, int input, int row, u32 barrier, Hint) {
    static_assert(MANY > 0);
    for (int block = 0; block < MANY; ++block) fetch_to(*host::cluster[block], to, map, {input, row}, barrier);
}
inline u32 block_of_cluster() { return host::now->block->rank; }
inline void cluster_is_here() { host::meet(host::everybody, host::told.threads * host::told.cluster); }
inline void wait_for_launch_before() {
    if (!host::begun) memcpy(host::told.awaited, host::told.written, host::told.awaited_bytes);
    host::begun = true;
}

// Products. The sums of a thread are of rows m and m + 8 and of columns n and n + 1; term(row, column, i, k) is one of the
// DEPTH that such a sum has, from what those threads gave that have that row (of half i) and that column at k.
template <int DEPTH, typename Given, typename Term>
void add_terms(float (&to)[4], const Given& given, Term term) {
    constexpr int beside = DEPTH / 8;  // neighbours at k that a thread gives
    const auto all = host::exchanged(given);
    const int lane = host::now->thread % 32;
    for (int i = 0; i < 4; ++i) {
        const int m = lane / 4, n = lane % 4 * 2 + i % 2;
        double sum = 0;
        for (int k = 0; k < DEPTH; ++k) {
            const int inner = k % (DEPTH / 2) / beside;
            sum += term(all[m * 4 + inner], all[n * 4 + inner], i / 2, k);
        }
        to[i] += (float)sum;
    }
}

struct Given { float left[4], first, second; };
inline void add_product(float (&to)[4], const float (&left)[4], float first, float second) {
    auto taken = [](float x) { return as<float>(as<u32>(x) & ~8191u); };  // 11 bits of a factor's numbers count
    add_terms<8>(to, Given{{left[0], left[1], left[2], left[3]}, first, second},
                 [&](const Given& row, const Given& column, int i, int k) {
                     return (double)taken(row.left[i + k / 4 * 2]) * taken(k < 4 ? column.first : column.second);
                 });
}

struct GivenPairs { u32 left[4], first, second; };
inline void add_product(float (&to)[4], const u32 (&left)[4], u32 first, u32 second) {
    auto half = [](u32 pair, int which) { return as<float>(which ? pair & 0xFFFF0000 : pair << 16); };
    add_terms<16>(to, GivenPairs{{left[0], left[1], left[2], left[3]}, first, second},
                  [&](const GivenPairs& row, const GivenPairs& column, int i, int k) {
                      const u32 other = k < 8 ? column.first : column.second;
                      return (double)half(row.left[i + k / 8 * 2], k % 2) * half(other, k % 2);
                  });
}

#ifdef WIDTH
inline float number_at(u64 matrix, int row, int column) {
    const u32 at = (u32)(matrix & 0x3FFF) << 4, eight = (u32)(matrix >> 32 & 0x3FFF) << 4;
    u16 number;
    memcpy(&number, host::place(*host::now->block, swizzled(at + row / 8 * eight + row % 8 * 128 + column * 2), 2, 2), 2);
    return as<float>((u32)number << 16);
}
inline void make_products(size_t most) {
    const u32 thread = host::now->thread % 128, row = thread / 32 * 16 + thread % 32 / 4;
    host::Meeting& group = host::now->block->groups[host::now->thread / 128];
    auto& products = host::now->products;
    host::meet(group, 128);
    for (; products.size() > most + 1; products.pop_front())
        for (auto& product : products.front())
            for (int i = 0; i < WIDTH / 2; ++i)
                for (int k = 0; k < 16; ++k)
                    product.sums[i] += number_at(product.left, row + i / 2 % 2 * 8, k) *
                                       number_at(product.right, i / 4 * 8 + thread % 4 * 2 + i % 2, k);
    host::meet(group, 128);
}
inline void begin_products() {}
inline void add_wide_product(float (&sums)[WIDTH / 2], u64 left, u64 right) {
    host::now->products.back().push_back({sums, left, right});
}
inline void end_of_products() {
    host::now->products.emplace_back();
    if (!host::told.late) make_products(0);
}
template <int MOST>
void wait_for_products() {
    if (host::told.late) make_products(MOST);
}
inline void not_used_before(float (&)[WIDTH / 2]) {}
#endif

template <bool MORE, int REGISTERS>
void have_registers() {
    static_assert(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256);
}

inline u32 packed(float first, float second) {
    auto rounded = [](float x) {
        const u32 bits = as<u32>(x);
        return std::isnan(x) ? 0x7FFFu : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    };
    return rounded(first) | rounded(second) << 16;
}
