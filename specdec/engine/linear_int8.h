// Products of weights of 8 bits and rows of 16, in whole numbers: included by linear_kernel.c, with LANES 16 and NAME(x) defined.
//
// The same numbers as `integer.py`: a row is rounded to two digits of 8 bits by a scale of its own, sums are exact, and their
// products with the scales are rounded one by one.

#include "lanes.h"

#define CHANNELS (2 * LANES)
#define STEP 4               // inputs that are multiplied at once
#define MAX_INT8_ROWS 6      // whose sums, two for a channel, the registers hold
#define ZERO 128             // what a digit of 0 is stored as
#define MAX_LEVEL 32639.0f   // the largest number of two digits from -128 to 127 whose negative has two as well
#define ROUNDING 32896.5f    // both digits' zeros, and a half: conversion cuts off

typedef uint8_t NAME(bytes) __attribute__((vector_size(LANES)));

// The rounded rows of a product, in tiles of MAX_INT8_ROWS at most, which go through a block of channels together.
typedef struct {
    float *scales;
    int32_t *digits;  // of each tile [steps, rows, low and high]: four digits + ZERO each; a step's lie side by side
    int64_t size, count;  // of tiles
} NAME(Tiles);

static NAME(Tiles) NAME(tiles_of)(const Product *product)
{
    const int64_t num_rows = product->num_rows, count = (num_rows + MAX_INT8_ROWS - 1) / MAX_INT8_ROWS;
    float *scales = (float *)product->room;
    return (NAME(Tiles)){scales, (int32_t *)(scales + num_rows), (num_rows + count - 1) / count, count};
}

// Return the largest absolute number; as bits, so that what is not a number is the largest.
static ALWAYS_INLINE float NAME(reach)(const void *row, int64_t first, int64_t num_in, const int is_bf16)
{
    NAME(ints) most = {0};
    for (int64_t index = 0; index < num_in; index += LANES) {
        const NAME(ints) bits = (NAME(ints))NAME(load)(row, first + index, num_in - index, is_bf16) & 0x7fffffff;
        const NAME(ints) is_more = bits > most;
        most = (is_more & bits) | (~is_more & most);
    }
    int32_t largest = 0;
    for (int lane = 0; lane < LANES; lane++)
        largest = most[lane] > largest ? most[lane] : largest;
    float reach;
    memcpy(&reach, &largest, sizeof reach);
    return reach;
}

// Round numbers by a scale, to digits as they are stored.
static ALWAYS_INLINE void NAME(divide)(FLOATS numbers, float scale, NAME(bytes) *low, NAME(bytes) *high)
{
    const NAME(ints) stored = __builtin_convertvector(numbers / scale + ROUNDING, NAME(ints));
    *low = __builtin_convertvector(stored & 255, NAME(bytes));
    *high = __builtin_convertvector(stored >> 8 & 255, NAME(bytes));
}

// Round a row to the digits of its tile, as number `place` of `count`; return its scale.
static ALWAYS_INLINE float NAME(round_row)(const void *row, int64_t first, int64_t num_in, int32_t *tile, int64_t place,
                                           int64_t count, const int is_bf16)
{
    const float scale = NAME(reach)(row, first, num_in, is_bf16) / MAX_LEVEL;
    for (int64_t index = 0; index < num_in; index += LANES) {
        NAME(bytes) low, high;
        NAME(divide)(NAME(load)(row, first + index, num_in - index, is_bf16), scale, &low, &high);
        for (int part = 0; part < LANES / STEP && index + part * STEP < num_in; part++) {
            int32_t *digits = tile + ((index / STEP + part) * count + place) * 2;
            memcpy(digits, (const uint8_t *)&low + part * STEP, STEP);
            memcpy(digits + 1, (const uint8_t *)&high + part * STEP, STEP);
        }
    }
    return scale;
}

// Return float32(sums - zeros) * scales, rounded by itself.
static ALWAYS_INLINE FLOATS NAME(scaled)(__m512i sums, __m512i zeros, FLOATS scales)
{
    FLOATS product = (FLOATS)_mm512_cvtepi32_ps(_mm512_sub_epi32(sums, zeros)) * scales;
    __asm__("" : "+v"(product));  // else it would be one operation with the sum that follows
    return product;
}

// Write a row's LANES channels, from `channel` on.
static ALWAYS_INLINE void NAME(put)(const Weight *all, void *output, int64_t row, int64_t channel, FLOATS sums)
{
    const int64_t left = all->num_out - channel, first = row * all->num_out + channel;
    const int count = left < LANES ? (int)left : LANES;
    if (count <= 0)
        return;
    if (!all->bias) {
        NAME(write)(output, first, sums, count, (int)all->is_bf16);
        return;
    }
    float rounded[LANES];  // the product is rounded to the rows' type before its bias is added
    NAME(write)(rounded, 0, sums, LANES, (int)all->is_bf16);
    const FLOATS product = NAME(load)(rounded, 0, LANES, (int)all->is_bf16);
    NAME(write)(output, first, product + NAME(at)(all->bias + channel, 0), count, (int)all->is_bf16);
}

// Multiply a tile of `num_rows` rows, whose first is `row`, with a block of channels; see linear_lanes.h.
static ALWAYS_INLINE void NAME(multiply)(const Weight *all, const int32_t *digits, const float *scales, void *output, int64_t row,
                                         int64_t channel, int64_t ahead, const int level, const int first_fetched,
                                         const int end_fetched, const int num_rows)
{
    const char *line = all->numbers + channel * all->num_in;
    __m512i sums[MAX_INT8_ROWS][2][2];
    UNROLLED for (int index = 0; index < num_rows; index++)
        UNROLLED for (int part = 0; part < 4; part++)
            sums[index][part / 2][part % 2] = _mm512_setzero_si512();
    for (int64_t input = 0; input < all->num_in; input += STEP, line += CHANNELS * STEP, digits += 2 * num_rows) {
        __m512i weights[2];
        UNROLLED for (int half = 0; half < 2; half++)
            weights[half] = _mm512_loadu_si512(line + 64 * half);
        UNROLLED for (int fetched = first_fetched; fetched < end_fetched; fetched++)
            fetch_line(line + ahead + 64 * fetched, level);
        UNROLLED for (int index = 0; index < num_rows; index++)
            UNROLLED for (int part = 0; part < 2; part++) {
                const __m512i four = _mm512_set1_epi32(digits[2 * index + part]);
                UNROLLED for (int half = 0; half < 2; half++)
                    // what GCC makes of the intrinsic copies every sum
                    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums[index][part][half]) : "v"(four), "v"(weights[half]));
            }
    }
    UNROLLED for (int half = 0; half < 2; half++) {
        const int64_t first = channel + LANES * half;
        const __m512i zeros = _mm512_loadu_si512(all->zeros + first);
        const FLOATS channels = NAME(at)(all->scales + first, 0);
        UNROLLED for (int index = 0; index < num_rows; index++) {
            const FLOATS low = NAME(scaled)(sums[index][0][half], zeros, channels);
            const FLOATS high = NAME(scaled)(sums[index][1][half], zeros, channels);
            NAME(put)(all, output, row + index, first, (low + high * 256.0f) * scales[row + index]);
        }
    }
}

// Round all rows.
static void NAME(round_rows)(const Product *product)
{
    const NAME(Tiles) tiles = NAME(tiles_of)(product);
    const int64_t num_in = product->weight.num_in, num_rows = product->num_rows;
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t place = row % tiles.size, begin = row - place;
        const int64_t count = num_rows - begin < tiles.size ? num_rows - begin : tiles.size;
        int32_t *tile = tiles.digits + begin * num_in / STEP * 2;
        tiles.scales[row] = product->weight.is_bf16
                                ? NAME(round_row)(product->rows, row * num_in, num_in, tile, place, count, 1)
                                : NAME(round_row)(product->rows, row * num_in, num_in, tile, place, count, 0);
    }
}

// Compute the channels from `channel` to `end`, once the rows are rounded.
static void NAME(multiply_channels)(const Product *product, void *output, int64_t channel, int64_t end)
{
    const Weight *all = &product->weight;
    const NAME(Tiles) tiles = NAME(tiles_of)(product);
    const int64_t num_rows = product->num_rows, num_tiles = tiles.count, block = all->num_in * CHANNELS;
    const int is_far = num_rows > MAX_NEAR_INT8_ROWS && fetches_far();
    for (; channel < end; channel += CHANNELS)
        for (int64_t row = 0; row < num_rows; row += tiles.size) {
            const int32_t *digits = tiles.digits + row * all->num_in / STEP * 2;
#define TILE(count)                                                                                                    \
    case count:                                                                                                        \
        if (is_far && row == 0)                                                                                        \
            NAME(multiply)(all, digits, tiles.scales, output, row, channel, FAR, 2, 0, 2, count);                      \
        else if (!is_far && num_tiles == 1)                                                                            \
            NAME(multiply)(all, digits, tiles.scales, output, row, channel, NEAR, 1, 0, 2, count);                     \
        else if (!is_far && row == 0)                                                                                  \
            NAME(multiply)(all, digits, tiles.scales, output, row, channel, block, 1, 0, 1, count);                    \
        else if (!is_far && row == tiles.size)                                                                         \
            NAME(multiply)(all, digits, tiles.scales, output, row, channel, block, 1, 1, 2, count);                    \
        else                                                                                                           \
            NAME(multiply)(all, digits, tiles.scales, output, row, channel, 0, 1, 0, 0, count);                        \
        break;
            switch (num_rows - row < tiles.size ? num_rows - row : tiles.size) {
                TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
            }
#undef TILE
        }
}

#undef CHANNELS
#undef STEP
#undef FLOATS
#undef INTS
#undef LANES
#undef NAME
