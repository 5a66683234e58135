// What the kernels share: compiler, shapes of their arguments, and what they call of one another.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")
#define IN_MEMORY(array) __asm__("" : "+m"(array))  // from here on, until it is next used
#define KEEP_ORDER() __asm__ volatile("" ::: "memory")  // of loads: ahead of time they take registers that sums need
#define LIST(...) __VA_ARGS__
#define WHOLE_LINES(num_bytes) (((num_bytes) + 63) / 64 * 64)
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (INTS){__VA_ARGS__})
#endif

// Fetch a line to the first cache, or only to the second; the compiler wants the level as it stands here, also without inlining.
static ALWAYS_INLINE void fetch_line(const char *line, const int level)
{
    if (level == 1)
        __builtin_prefetch(line);
    else
        __builtin_prefetch(line, 0, 2);
}

#if defined(__x86_64__) && !defined(__clang__)
#define HAS_VERSIONS // for wider vectors than every processor has
#include <immintrin.h>
#if defined(__linux__) && __GNUC__ >= 12
#define HAS_TILES // of Intel's matrix unit
#endif
#endif

// One layer's attention; sizes and strides in numbers, not in bytes.
typedef struct {
    const void *query;     // [tokens, heads, key_size], tokens query_stride apart
    const void *keys;      // [slots, kv_heads, key_size], slots slot_heads heads apart
    const void *values;    // [slots, kv_heads, value_size], the same
    void *output;          // [tokens, heads, value_size], tokens output_heads heads apart
    const float *sinks;    // [heads], or NULL
    const int64_t *slots;  // of the trees' paths
    int64_t query_stride, slot_heads, output_heads, num_heads, num_kv_heads, key_size, value_size;
    int64_t window;        // a token sees so many positions, its own included; 0: all
    float scaling, softcap;  // softcap 0: none
    int64_t is_bf16;       // else float32
    int64_t lanes;         // of a vector, one that specdec_lanes gives or fewer: 16, 8 or 4
    int64_t has_tiles;     // attend in tiles where the type and the sizes allow it: where specdec_has_tiles
} Attention;

// One new token, which sees positions 0 to end - 1 of its text. The first num_linear lie in a row from first_slot on, the
// others in slots[path], slots[path + 1], ...
typedef struct {
    int64_t token, first_slot, num_linear, end, path;
} Row;

// A linear layer's weight, in blocks of channels that go through the rows together.
typedef struct {
    const char *numbers;   // [blocks, steps, channels of a block, inputs of a step], zeros after the last channel
    const float *bias;     // [num_out], rounded up to whole blocks, as the next two; or NULL
    const float *scales;   // of weights of 8 bits, four inputs a step; NULL: of the rows' type
    const int32_t *zeros;  // what the sums over stored digits are too large by
    int64_t num_in, num_out;
    int64_t is_bf16;       // the rows and what is computed, and two inputs a step; else float32, and one
    int64_t is_halved;     // of float32 whose lower halves are zeros: only the upper ones are stored, two inputs a step
    int64_t lanes;         // a block has twice as many channels
    int64_t has_tiles;     // multiply in tiles: where specdec_has_tiles, and a row is one of whole tiles, of 64 bytes each
} Weight;

// Work that several threads can do: parts that are computed one by one, each by one thread.
typedef struct {
    void (*compute)(const void *task, int64_t part, char *output, char *room);
    void (*copy)(const void *task, int64_t part, const char *from, char *to);  // a part, between two outputs
    const void *task;    // what both read. A helper has a copy of these task_bytes; but what they point to may meanwhile be
                         // another job's, whatever it then computes: no number there may say where to read or write
    char *output;        // what the parts are parts of
    char *room;          // for `compute`
    int64_t task_bytes, output_bytes, num_parts;
    int64_t unevenness;  // how many times as long as the mean part the longest takes, about
} Job;

#define MAX_TASK_BYTES (1 << 18)
#define MAX_PARTS 1024

int64_t specdec_has_pairs(void);
int64_t specdec_room(const Attention *all);
void specdec_attend(const Attention *all, const Row *rows, int64_t num_rows, float *room);
void specdec_store(char *slots, const char *tokens, int64_t stride, const int64_t *places, int64_t count, int64_t num_bytes);
char *specdec_room_to_share(int64_t shared_bytes, int64_t output_bytes, int64_t room_bytes);
void specdec_share(const Job *job);
void specdec_attend_shared(const Attention *all, const Row *rows, int64_t num_rows, int64_t num_paths, float *room);
int64_t specdec_product_room(const Weight *weight, int64_t num_rows);
void specdec_multiply(const Weight *weight, const void *rows, void *output, int64_t num_rows, char *room);
