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

// Rows that go through a block of channels together.
typedef struct {
    int32_t *digits;  // [steps, rows, low and high]: four digits + ZERO each; a step's lie side by side
    float scales[MAX_INT8_ROWS];
    int64_t first, count;
} NAME(Tile);

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

// Round a row to digits, as number `place` of its tile.
static ALWAYS_INLINE void NAME(round_row)(const void *row, int64_t first, int64_t num_in, NAME(Tile) *tile, int64_t place,
                                          const int is_bf16)
{
    const float scale = NAME(reach)(row, first, num_in, is_bf16) / MAX_LEVEL;
    for (int64_t index = 0; index < num_in; index += LANES) {
        NAME(bytes) low, high;
        NAME(divide)(NAME(load)(row, first + index, num_in - index, is_bf16), scale, &low, &high);
        for (int part = 0; part < LANES / STEP && index + part * STEP < num_in; part++) {
            int32_t *digits = tile->digits + ((index / STEP + part) * tile->count + place) * 2;
            memcpy(digits, (const uint8_t *)&low + part * STEP, STEP);
            memcpy(digits + 1, (const uint8_t *)&high + part * STEP, STEP);
        }
    }
    tile->scales[place] = scale;
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

static ALWAYS_INLINE void NAME(multiply)(const Weight *all, const NAME(Tile) *tile, void *output, int64_t channel,
                                         int64_t ahead, const int level, const int first_fetched, const int end_fetched,
                                         const int num_rows)
{
    const char *line = all->numbers + channel * all->num_in;
    const int32_t *digits = tile->digits;
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
        const FLOATS scales = NAME(at)(all->scales + first, 0);
        UNROLLED for (int index = 0; index < num_rows; index++) {
            const FLOATS low = NAME(scaled)(sums[index][0][half], zeros, scales);
            const FLOATS high = NAME(scaled)(sums[index][1][half], zeros, scales);
            NAME(put)(all, output, tile->first + index, first, (low + high * 256.0f) * tile->scales[index]);
        }
    }
}

// Round all rows, then go through the channels; `room` has specdec_product_room bytes.
static void NAME(multiply_all)(const Weight *all, const void *rows, void *output, int64_t num_rows, char *room)
{
    const int64_t num_tiles = (num_rows + MAX_INT8_ROWS - 1) / MAX_INT8_ROWS, block = all->num_in * CHANNELS;
    const int is_far = num_rows > MAX_NEAR_INT8_ROWS && fetches_far();
    const int64_t most = num_tiles ? (num_rows + num_tiles - 1) / num_tiles : 1;
    NAME(Tile) *tiles = (NAME(Tile) *)room;
    int32_t *digits = (int32_t *)(tiles + num_rows);
    for (int64_t number = 0, row = 0; number < num_tiles; number++) {
        NAME(Tile) *tile = tiles + number;
        tile->digits = digits;
        tile->first = row;
        tile->count = num_rows - row < most ? num_rows - row : most;
        for (int64_t place = 0; place < tile->count; place++, row++)
            if (all->is_bf16)
                NAME(round_row)(rows, row * all->num_in, all->num_in, tile, place, 1);
            else
                NAME(round_row)(rows, row * all->num_in, all->num_in, tile, place, 0);
        digits += tile->count * all->num_in / STEP * 2;
    }
    for (int64_t channel = 0; channel < all->num_out; channel += CHANNELS)
        for (int64_t number = 0; number < num_tiles; number++) {
#define TILE(count)                                                                                                    \
    case count:                                                                                                        \
        if (is_far && number == 0)                                                                                     \
            NAME(multiply)(all, tiles, output, channel, FAR, 2, 0, 2, count);                                          \
        else if (!is_far && num_tiles == 1)                                                                            \
            NAME(multiply)(all, tiles, output, channel, NEAR, 1, 0, 2, count);                                         \
        else if (!is_far && number == 0)                                                                               \
            NAME(multiply)(all, tiles, output, channel, block, 1, 0, 1, count);                                        \
        else if (!is_far && number == 1)                                                                               \
            NAME(multiply)(all, tiles + 1, output, channel, block, 1, 1, 2, count);                                    \
        else                                                                                                           \
            NAME(multiply)(all, tiles + number, output, channel, 0, 1, 0, 0, count);                                   \
        break;
            switch (tiles[number].count) {
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
