// Products of rows and a weight of bfloat16: for the few rows of a decoding forward as fast as the weight can be read.
//
// An output's sum runs over the inputs in their order, two at a time, in float32, whatever other rows are in the call: its
// bits depend on its own row and channel alone.

#include <stdint.h>
#include <string.h>

#define CHANNELS 32      // that go through the rows together, and lie together in the weight
#define MAX_ROWS 14      // whose sums the registers hold
#define FETCHED 8192     // bytes of the weight between what is multiplied and what is fetched

#if defined(__x86_64__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,avx512bf16,prefer-vector-width=512")
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

// One product; sizes in numbers, not in bytes.
typedef struct {
    const uint16_t *rows;  // [num_rows, num_in]
    const char *weight;    // [num_out / CHANNELS, num_in / 2, CHANNELS, 2], zeros after the last channel
    const float *bias;     // [num_out], rounded up to CHANNELS, or NULL
    uint16_t *output;      // [num_rows, num_out]
    int64_t num_rows, num_in, num_out;
} Product;

// Multiply `num_rows` rows, from `row` on, with CHANNELS channels, from `channel` on. Of each line of the weight, two for a
// pair of inputs, those from `first_fetched` to `end_fetched` are fetched `ahead` bytes before they are wanted.
static ALWAYS_INLINE void multiply(const Product *all, int64_t row, int64_t channel, int64_t ahead, const int first_fetched,
                                   const int end_fetched, const int num_rows)
{
    const char *weight = all->weight + channel * all->num_in * 2;
    const uint16_t *rows = all->rows + row * all->num_in;
    __m512 sums[MAX_ROWS][2];
    UNROLLED for (int index = 0; index < num_rows; index++)
        UNROLLED for (int half = 0; half < 2; half++)
            sums[index][half] = all->bias ? _mm512_loadu_ps(all->bias + channel + 16 * half) : _mm512_setzero_ps();
    for (int64_t pair = 0; pair < all->num_in / 2; pair++) {
        const char *line = weight + pair * CHANNELS * 4;
        __m512bh numbers[2];
        UNROLLED for (int half = 0; half < 2; half++)
            numbers[half] = (__m512bh)_mm512_loadu_si512(line + 64 * half);
        UNROLLED for (int fetched = first_fetched; fetched < end_fetched; fetched++)
            __builtin_prefetch(line + ahead + 64 * fetched);
        UNROLLED for (int index = 0; index < num_rows; index++) {
            int32_t both;
            memcpy(&both, rows + index * all->num_in + 2 * pair, sizeof both);
            UNROLLED for (int half = 0; half < 2; half++)
                sums[index][half] =
                    _mm512_dpbf16_ps(sums[index][half], numbers[half], (__m512bh)_mm512_set1_epi32(both));
        }
    }
    const int64_t left = all->num_out - channel;
    UNROLLED for (int index = 0; index < num_rows; index++)
        UNROLLED for (int half = 0; half < 2; half++) {
            const int64_t count = left - 16 * half;
            const __mmask16 kept = count >= 16 ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
            uint16_t *output = all->output + (row + index) * all->num_out + channel + 16 * half;
            _mm256_mask_storeu_epi16(output, kept, (__m256i)_mm512_cvtneps_pbh(sums[index][half]));
        }
}

static void multiply_all(const Product *all)
{
    const int64_t num_tiles = (all->num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t tile = num_tiles ? (all->num_rows + num_tiles - 1) / num_tiles : 1, block = all->num_in * CHANNELS * 2;
    for (int64_t channel = 0; channel < all->num_out; channel += CHANNELS)
        for (int64_t row = 0; row < all->num_rows; row += tile) {
            const int64_t count = all->num_rows - row < tile ? all->num_rows - row : tile;
            // rows that go through a block alone fetch just ahead; others share the work of fetching the next block
#define TILE(number)                                                                                                   \
    case number:                                                                                                       \
        if (num_tiles == 1)                                                                                            \
            multiply(all, row, channel, FETCHED, 0, 2, number);                                                        \
        else if (row == 0)                                                                                             \
            multiply(all, row, channel, block, 0, 1, number);                                                          \
        else if (row == tile)                                                                                          \
            multiply(all, row, channel, block, 1, 2, number);                                                          \
        else                                                                                                           \
            multiply(all, row, channel, 0, 0, 0, number);                                                              \
        break;
            switch (count) {
                TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7)
                TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
            }
#undef TILE
        }
}
#pragma GCC pop_options

// Return whether this processor multiplies pairs of bfloat16 in vectors of 512 bits.
int64_t specdec_has_pairs(void)
{
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
           && __builtin_cpu_supports("avx512dq");
}
#else
int64_t specdec_has_pairs(void)
{
    return 0;
}
#endif

// Compute rows @ weight.T + bias, where specdec_has_pairs; num_in is even.
void specdec_multiply(const uint16_t *rows, const char *weight, const float *bias, uint16_t *output, int64_t num_rows,
                      int64_t num_in, int64_t num_out)
{
#if defined(__x86_64__) && !defined(__clang__)
    const Product all = {rows, weight, bias, output, num_rows, num_in, num_out};
    multiply_all(&all);
#endif
}
