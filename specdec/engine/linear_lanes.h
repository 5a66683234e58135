// Products for one width of vectors and one type of numbers: included once for each, with LANES, IS_BF16, IS_HALVED, MAX_ROWS and
// NAME(x) defined.

#include "lanes.h"

#define CHANNELS (2 * LANES)       // of a block
#define STEP (CHANNELS * 4)        // bytes of the weight that are wanted in a step
#define LINES (STEP / 64)
#define ROW_BYTES (IS_BF16 ? 2 : 4)  // of one input
#define WEIGHT_BYTES (IS_BF16 || IS_HALVED ? 2 : 4)
#define STEP_BYTES (IS_HALVED ? 8 : 4)  // of a row, in a step

// Add the products of LANES channels with the 4 bytes at `inputs` to their sums.
static ALWAYS_INLINE FLOATS NAME(accumulate)(FLOATS sums, FLOATS numbers, const char *inputs)
{
#if IS_BF16
    int32_t both;
    memcpy(&both, inputs, sizeof both);
    return (FLOATS)_mm512_dpbf16_ps((__m512)sums, (__m512bh)numbers, (__m512bh)_mm512_set1_epi32(both));
#else
    float input;
    memcpy(&input, inputs, sizeof input);
    return sums + numbers * input;
#endif
}

// Return the numbers of a step's input: of a halved weight, the lower or the upper half of each float's place.
static ALWAYS_INLINE FLOATS NAME(numbers_of)(FLOATS stored, const int input)
{
#if IS_HALVED
    static const uint32_t upper[LANES] __attribute__((aligned(4 * LANES))) = {[0 ... LANES - 1] = 0xffff0000u};
    const uint32_t *mask = upper;
    __asm__("" : "+r"(mask));  // it stays in memory: a register for it would be one too many
    return input ? (FLOATS)((NAME(words))stored & *(const NAME(words) *)mask) : (FLOATS)((NAME(words))stored << 16);
#else
    (void)input;
    return stored;
#endif
}

// Write LANES sums of a row, of which `count` are wanted, from `first` on.
static ALWAYS_INLINE void NAME(put)(void *output, int64_t first, FLOATS sums, int64_t count)
{
#if IS_BF16
    const __mmask16 kept = count >= 16 ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
    _mm256_mask_storeu_epi16((uint16_t *)output + first, kept, (__m256i)_mm512_cvtneps_pbh((__m512)sums));
#else
    if (count >= LANES)
        memcpy((float *)output + first, &sums, sizeof sums);
    else if (count > 0)
        memcpy((float *)output + first, &sums, sizeof(float) * (size_t)count);
#endif
}

// Multiply `num_rows` rows, from `row` on, with a block of channels, from `channel` on. In each step `num_fetched` lines of what
// is wanted later are fetched as far as cache `level`: first those at `fetched`, and `stride` bytes on in the next.
static ALWAYS_INLINE void NAME(multiply)(const Weight *all, const char *rows, void *output, int64_t row, int64_t channel,
                                         const char *fetched, int64_t stride, const int level, const int num_fetched,
                                         const int num_rows)
{
    const int64_t num_bytes = all->num_in * ROW_BYTES;  // of a row
    const char *line = all->numbers + channel * all->num_in * WEIGHT_BYTES, *inputs = rows + row * num_bytes;
    FLOATS totals[MAX_ROWS][2];
    UNROLLED for (int index = 0; index < num_rows; index++)
        UNROLLED for (int half = 0; half < 2; half++)
            totals[index][half] = all->bias ? NAME(at)(all->bias + channel, half) : (FLOATS){0};
    for (int64_t first = 0; first < num_bytes; first += SPAN_BYTES) {
        const int64_t end = first + SPAN_BYTES < num_bytes ? first + SPAN_BYTES : num_bytes;
        FLOATS sums[MAX_ROWS][2] = {0};
        IN_MEMORY(totals);  // the registers are for the sums
        for (int64_t byte = first; byte < end; byte += STEP_BYTES, line += STEP, fetched += stride) {
            UNROLLED for (int index = 0; index < num_fetched; index++)
                fetch_line(fetched + 64 * index, level);
            UNROLLED for (int input = 0; input < STEP_BYTES / 4; input++) {
                FLOATS numbers[2];
                UNROLLED for (int half = 0; half < 2; half++)
                    numbers[half] = NAME(numbers_of)(NAME(at)((const float *)line, half), input);
                UNROLLED for (int index = 0; index < num_rows; index++) {
                    if (IS_HALVED)
                        KEEP_ORDER();
                    UNROLLED for (int half = 0; half < 2; half++)
                        sums[index][half] = NAME(accumulate)(sums[index][half], numbers[half],
                                                             inputs + index * num_bytes + byte + 4 * input);
                }
            }
        }
        UNROLLED for (int index = 0; index < num_rows; index++)
            UNROLLED for (int half = 0; half < 2; half++)
                totals[index][half] += sums[index][half];
    }
    UNROLLED for (int index = 0; index < num_rows; index++)
        UNROLLED for (int half = 0; half < 2; half++)
            NAME(put)(output, (row + index) * all->num_out + channel + LANES * half, totals[index][half],
                      all->num_out - channel - LANES * half);
}

// Compute the channels from `channel` to `end`.
void NAME(channels)(const Product *product, void *output, int64_t channel, int64_t end)
{
    const Weight *all = &product->weight;
    const char *rows = product->rows;
    const int64_t num_rows = product->num_rows, num_tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t tile = (num_rows + num_tiles - 1) / num_tiles;
    const int64_t block = all->num_in * WEIGHT_BYTES * CHANNELS;
    const int is_far = fetches_far();
    for (; channel < end; channel += CHANNELS)
        for (int64_t row = 0; row < num_rows; row += tile) {
            const int64_t count = num_rows - row < tile ? num_rows - row : tile;
            const char *line = all->numbers + channel * all->num_in * WEIGHT_BYTES;
            // rows that go through a block alone fetch just ahead; others share the work of fetching the next block.
            // What cannot be is left out by numbers that the compiler knows: each of these is a function of its own
#define TILE(number)                                                                                                   \
    case number:                                                                                                       \
        if (LANES == 16 && number > MAX_NEAR_ROWS && is_far && row == 0)                                               \
            NAME(multiply)(all, rows, output, row, channel, line + FAR, STEP, 2, LINES, number);                       \
        else if (!is_far && num_tiles == 1)                                                                            \
            NAME(multiply)(all, rows, output, row, channel, line + NEAR, STEP, 1, LINES, number);                      \
        else if (!is_far && number >= MAX_ROWS / 2)                                                                    \
            NAME(multiply)(all, rows, output, row, channel, line + block + block * (row / tile) / num_tiles,           \
                           STEP / num_tiles, 1, 1, number);                                                            \
        else                                                                                                           \
            NAME(multiply)(all, rows, output, row, channel, line, 0, 1, 0, number);                                    \
        break;
            switch (count) {
                TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if MAX_ROWS > 6
                TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
#endif
            }
#undef TILE
        }
}

#undef CHANNELS
#undef LINES
#undef STEP
#undef ROW_BYTES
#undef WEIGHT_BYTES
#undef STEP_BYTES
#undef FLOATS
#undef INTS
#undef LANES
#undef IS_BF16
#undef IS_HALVED
#undef MAX_ROWS
#undef NAME
