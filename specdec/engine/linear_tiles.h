// Products by the processor's matrix unit (Intel AMX), 16 rows and 16 channels at once: included by linear_kernel.c.
//
// The weight lies as for the other kernels: 16 steps of 16 channels are a tile. Up to 16 rows of bfloat16 or of 8 bits take as
// long as the weight takes to be read. Of bfloat16 a sum runs over the inputs in their order, two at a time, in float32; of
// 8 bits sums are exact, and their bits those of linear_int8.h. So a row's bits depend on it alone.

#include "tiles.h"

#define CHANNELS 32                           // of a block: two tiles
#define CHUNK_BYTES (16 * CHANNELS * 4)       // of the weight, for TILE_BYTES of a row
#define CHUNK_LINES (CHUNK_BYTES / 64)
// The tiles' numbers, which stand in the instructions: sums of a group of rows and a half of a block, and what they are of.
#define SUMS_00 0
#define SUMS_01 1
#define SUMS_10 2
#define SUMS_11 3
#define INPUTS_0 4
#define INPUTS_1 5
#define WEIGHTS_0 6
#define WEIGHTS_1 7

// Sums of two groups of rows; of 8 bits, of the low and the high digits of one group.
typedef float TileSums[2][TILE_ROWS][CHANNELS] __attribute__((aligned(64)));

// The rows, in groups that go through a block of channels together.
typedef struct {
    const char *rows, *last;  // [groups * size, row_bytes]; the last group, with zeros after its last row
    int64_t row_bytes, size, count;
} Groups;

// Divide rows into groups that are as equal as can be; `last` is where the last is copied to if it is smaller than the others.
static Groups grouped(const char *rows, int64_t num_rows, int64_t row_bytes, const char *last)
{
    const int64_t count = (num_rows + TILE_ROWS - 1) / TILE_ROWS, size = (num_rows + count - 1) / count;
    const int64_t before_last = (count - 1) * size;
    return (Groups){rows, num_rows - before_last == size ? rows + before_last * row_bytes : last, row_bytes, size, count};
}

static Groups groups_of(const Product *product)
{
    return grouped(product->rows, product->num_rows, 2 * product->weight.num_in, product->room);
}

// Copy the last group to the product's room where it is smaller than the others.
static void fill_last(const Product *product)
{
    const Groups groups = groups_of(product);
    const int64_t first = (groups.count - 1) * groups.size, num_bytes = (product->num_rows - first) * groups.row_bytes;
    if (groups.last != product->room)
        return;
    memcpy(product->room, product->rows + first * groups.row_bytes, (size_t)num_bytes);
    memset(product->room + num_bytes, 0, (size_t)(groups.size * groups.row_bytes - num_bytes));
}

static ALWAYS_INLINE const char *group_of(const Groups *groups, int64_t number)
{
    return number == groups->count - 1 ? groups->last : groups->rows + number * groups->size * groups->row_bytes;
}

// Add up the products of a block of channels and of one or two tiles of rows. In each chunk of the weight `num_fetched` lines,
// from line `first_fetched` on, are fetched `ahead` bytes before they are wanted.
static ALWAYS_INLINE void multiply_tiles(const char *line, const char *first, const char *second, int64_t row_bytes,
                                         int64_t ahead, int64_t first_fetched, int64_t num_fetched, const int num_tiles,
                                         const int is_int8, TileSums sums)
{
    written(first);
    _tile_zero(SUMS_00);
    _tile_zero(SUMS_01);
    if (num_tiles == 2) {
        _tile_zero(SUMS_10);
        _tile_zero(SUMS_11);
    }
    for (int64_t byte = 0; byte < row_bytes; byte += TILE_BYTES, line += CHUNK_BYTES) {
        const char *fetched = line + ahead + 64 * first_fetched;
        for (int64_t index = 0; index < num_fetched; index++)
            __builtin_prefetch(fetched + 64 * index);
        _tile_loadd(WEIGHTS_0, line, 4 * CHANNELS);
        _tile_loadd(WEIGHTS_1, line + 64, 4 * CHANNELS);
        _tile_loadd(INPUTS_0, first + byte, row_bytes);
        if (num_tiles == 2)
            _tile_loadd(INPUTS_1, second + byte, row_bytes);
        if (is_int8) {
            _tile_dpbusd(SUMS_00, INPUTS_0, WEIGHTS_0);
            _tile_dpbusd(SUMS_01, INPUTS_0, WEIGHTS_1);
            _tile_dpbusd(SUMS_10, INPUTS_1, WEIGHTS_0);
            _tile_dpbusd(SUMS_11, INPUTS_1, WEIGHTS_1);
        } else {
            _tile_dpbf16ps(SUMS_00, INPUTS_0, WEIGHTS_0);
            _tile_dpbf16ps(SUMS_01, INPUTS_0, WEIGHTS_1);
            if (num_tiles == 2) {
                _tile_dpbf16ps(SUMS_10, INPUTS_1, WEIGHTS_0);
                _tile_dpbf16ps(SUMS_11, INPUTS_1, WEIGHTS_1);
            }
        }
    }
    _tile_stored(SUMS_00, sums[0][0], sizeof sums[0][0]);
    _tile_stored(SUMS_01, sums[0][0] + 16, sizeof sums[0][0]);
    if (num_tiles == 2) {
        _tile_stored(SUMS_10, sums[1][0], sizeof sums[1][0]);
        _tile_stored(SUMS_11, sums[1][0] + 16, sizeof sums[1][0]);
    }
    written(sums);
}

// Write a row's sums over a block of channels, with the bias, as bfloat16.
static ALWAYS_INLINE void put_bf16_row(const Weight *all, void *output, int64_t row, int64_t channel, const float *sums)
{
    for (int half = 0; half < 2; half++) {
        const int64_t first = channel + 16 * half, left = all->num_out - first;
        __m512 numbers = _mm512_load_ps(sums + 16 * half);
        if (all->bias)
            numbers = _mm512_add_ps(numbers, _mm512_loadu_ps(all->bias + first));
        const __mmask16 kept = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
        _mm256_mask_storeu_epi16((uint16_t *)output + row * all->num_out + first, kept, (__m256i)_mm512_cvtneps_pbh(numbers));
    }
}

// Return how many bytes the products of so many rows need.
static int64_t tiles_room(const Weight *all, int64_t num_rows)
{
    const int64_t num_all = num_rows + TILE_ROWS;  // at most, in whole groups
    return all->scales ? num_all * (2 * all->num_in + (int64_t)sizeof(float)) : TILE_ROWS * 2 * all->num_in;
}

// Compute the channels from `channel` to `end` of bfloat16, once fill_last is done.
static void multiply_bf16_tiles(const Product *product, void *output, int64_t channel, int64_t end)
{
    const Weight *all = &product->weight;
    const int64_t num_rows = product->num_rows;
    const Groups groups = groups_of(product);
    const int64_t block = groups.row_bytes * CHANNELS, num_passes = (groups.count + 1) / 2;
    TileSums sums;
    set_tiles(groups.size);
    for (; channel < end; channel += CHANNELS) {
        const char *line = all->numbers + channel * groups.row_bytes;
        for (int64_t pass = 0; pass < num_passes; pass++) {
            // rows that go through a block in one pass fetch just ahead; others share the work of fetching the next block
            const int64_t ahead = num_passes == 1 ? NEAR : block;
            const int64_t fetched = CHUNK_LINES * pass / num_passes, end = CHUNK_LINES * (pass + 1) / num_passes;
            const char *first = group_of(&groups, 2 * pass);
            if (2 * pass + 1 < groups.count)
                multiply_tiles(line, first, group_of(&groups, 2 * pass + 1), groups.row_bytes, ahead, fetched, end - fetched, 2, 0,
                               sums);
            else
                multiply_tiles(line, first, first, groups.row_bytes, ahead, fetched, end - fetched, 1, 0, sums);
            for (int64_t index = 0, row = 2 * pass * groups.size; index < 2 * groups.size && row < num_rows; index++, row++)
                put_bf16_row(all, output, row, channel, sums[index / groups.size][index % groups.size]);
        }
    }
    _tile_release();
}

// Round a row by a scale of its own, which is returned, to its low and its high digits.
static ALWAYS_INLINE float round_int8_row(const void *rows, int64_t first, int64_t num_in, uint8_t *low, uint8_t *high,
                                          const int is_bf16)
{
    const float scale = reach_int8(rows, first, num_in, is_bf16) / MAX_LEVEL;
    for (int64_t index = 0; index < num_in; index += 16) {
        bytes_int8 parts[2];
        divide_int8(load_int8(rows, first + index, 16, is_bf16), scale, parts, parts + 1);
        memcpy(low + index, parts, sizeof parts[0]);
        memcpy(high + index, parts + 1, sizeof parts[1]);
    }
    return scale;
}

// The rounded rows of a product: scales, then low and high digits, each of whole groups.
typedef struct {
    float *scales;
    uint8_t *digits[2];
    int64_t size, count;  // of groups
} Rounded;

static Rounded rounded(const Product *product)
{
    const int64_t num_in = product->weight.num_in;
    const Groups groups = grouped(NULL, product->num_rows, num_in, NULL);
    float *scales = (float *)product->room;
    uint8_t *digits = (uint8_t *)(scales + product->num_rows);
    return (Rounded){scales, {digits, digits + groups.count * groups.size * num_in}, groups.size, groups.count};
}

// Round all rows.
static void round_int8_rows(const Product *product)
{
    const Rounded to = rounded(product);
    const int64_t num_in = product->weight.num_in;
    for (int64_t row = 0, first = 0; row < product->num_rows; row++, first += num_in)
        to.scales[row] = product->weight.is_bf16
                             ? round_int8_row(product->rows, first, num_in, to.digits[0] + first, to.digits[1] + first, 1)
                             : round_int8_row(product->rows, first, num_in, to.digits[0] + first, to.digits[1] + first, 0);
}

// Compute the channels from `channel` to `end` with weights of 8 bits, once the rows are rounded.
static void multiply_int8_tiles(const Product *product, void *output, int64_t channel, int64_t end)
{
    const Weight *all = &product->weight;
    const Rounded from = rounded(product);
    const int64_t num_in = all->num_in;
    TileSums sums;
    set_tiles(from.size);
    for (; channel < end; channel += CHANNELS)
        for (int64_t number = 0; number < from.count; number++) {
            const int64_t begin = number * from.size, fetched = CHUNK_LINES * number / from.count;
            multiply_tiles(all->numbers + channel * num_in, (char *)from.digits[0] + begin * num_in,
                           (char *)from.digits[1] + begin * num_in, num_in, from.count == 1 ? NEAR : num_in * CHANNELS, fetched,
                           CHUNK_LINES * (number + 1) / from.count - fetched, 2, 1, sums);
            for (int half = 0; half < 2; half++) {
                const __m512i zeros = _mm512_loadu_si512(all->zeros + channel + 16 * half);
                const floats_int8 channels = at_int8(all->scales + channel + 16 * half, 0);
                for (int64_t index = 0; index < from.size && begin + index < product->num_rows; index++) {
                    const floats_int8 low = scaled_int8(_mm512_load_si512(sums[0][index] + 16 * half), zeros, channels);
                    const floats_int8 high = scaled_int8(_mm512_load_si512(sums[1][index] + 16 * half), zeros, channels);
                    put_int8(all, output, begin + index, channel + 16 * half, (low + high * 256.0f) * from.scales[begin + index]);
                }
            }
        }
    _tile_release();
}
