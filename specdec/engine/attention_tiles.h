// Attention of bfloat16 by the processor's matrix unit (Intel AMX): included by attention_kernel.c, after attention_lanes.h for
// 16 lanes.
//
// As there, a token's sums run over the positions of its own text in blocks, in float32; weights are rounded to bfloat16 before
// they are multiplied with values. A position has the same place in a block whichever row sees it, and one that a row does not
// see adds 0, so a token's bits depend on its text alone.

#include "tiles.h"

#define MAX_TILES_SIZE 512  // of a key or a value
#define NUM_STEPS (BLOCK / TILE_ROWS)

// The keys and values of a block, as the unit reads them: a step's pairs of numbers side by side.
typedef struct {
    uint32_t *keys;    // [key_size / 32, NUM_STEPS, pairs of numbers, keys]
    uint32_t *values;  // [BLOCK / 32, value_size / 16, pairs of keys, numbers]
} BlockTiles;

// A text's query heads that share keys: `group` heads a row.
typedef struct {
    const uint16_t *numbers;  // [queries, key_size], and memory of TILE_ROWS more
    float *sums;              // [queries, value_size]
    State *states;            // [queries]; of `totals` the first
} Queries;

static const char no_numbers[2 * MAX_TILES_SIZE];  // of positions that nobody sees

static int fits_tiles(int64_t size)
{
    return size % 32 == 0 && size <= MAX_TILES_SIZE;
}

// Arrange a block's keys and values, which lie anywhere.
static void arrange(const Attention *all, const char *const *keys, const char *const *values, BlockTiles tiles)
{
    for (int64_t chunk = 0; chunk < all->key_size / 32; chunk++)
        for (int step = 0; step < NUM_STEPS; step++)
            transpose(keys + TILE_ROWS * step, 64 * chunk, tiles.keys + 256 * (NUM_STEPS * chunk + step));
    __m512i order[2];
    for (int half = 0; half < 2; half++) {
        uint16_t places[32];
        for (int place = 0; place < 32; place++)
            places[place] = (uint16_t)(16 * half + place / 2 + 32 * (place % 2));
        order[half] = _mm512_loadu_si512(places);
    }
    for (int64_t pair = 0; pair < BLOCK / 2; pair++) {
        uint32_t *first = tiles.values + (pair / 16 * (all->value_size / 16) * 16 + pair % 16) * 16;
        for (int64_t number = 0; number < all->value_size; number += 32) {
            const __m512i one = _mm512_loadu_si512(values[2 * pair] + 2 * number);
            const __m512i other = _mm512_loadu_si512(values[2 * pair + 1] + 2 * number);
            for (int half = 0; half < 2; half++)
                _mm512_storeu_si512(first + 256 * (number / 16 + half), _mm512_permutex2var_epi16(one, order[half], other));
        }
    }
}

// Turn a query's scores, of which it sees those from `from` to `to`, into weights; return by how much its sums shrink.
static ALWAYS_INLINE float weigh_row(const Attention *all, const float *scores, int from, int to, State *state, uint16_t *weights)
{
    floats_16 numbers[NUM_STEPS], largest = (floats_16){0} + state->most, sums = {0};
    __mmask16 seen[NUM_STEPS];
    UNROLLED for (int step = 0; step < NUM_STEPS; step++) {
        const int first = from - TILE_ROWS * step, end = to - TILE_ROWS * step;
        const uint32_t before = first <= 0 ? 0 : first >= 16 ? 0xffff : (1u << first) - 1;
        const uint32_t until = end <= 0 ? 0 : end >= 16 ? 0xffff : (1u << end) - 1;
        seen[step] = (__mmask16)(until & ~before);
        numbers[step] = at_16(scores + TILE_ROWS * step, 0) * all->scaling;
        if (all->softcap > 0)
            for (int lane = 0; lane < 16; lane++)
                numbers[step][lane] = tanhf(numbers[step][lane] / all->softcap) * all->softcap;
        numbers[step] = (floats_16)_mm512_mask_blend_ps(seen[step], _mm512_set1_ps(LEAST), (__m512)numbers[step]);
        largest = larger_16(largest, numbers[step]);
    }
    const float most = largest_of_16(largest), shrink = exponential_16((floats_16){0} + (state->most - most))[0];
    UNROLLED for (int step = 0; step < NUM_STEPS; step++) {
        const __m512 weight = _mm512_maskz_mov_ps(seen[step], (__m512)exponential_16(numbers[step] - most));
        sums += (floats_16)weight;
        _mm256_storeu_si256((__m256i *)(weights + TILE_ROWS * step), (__m256i)_mm512_cvtneps_pbh(weight));
    }
    state->most = most;
    state->totals[0] = state->totals[0] * shrink + sum_of_16(sums);
    return shrink;
}

// Go through a block for some queries; `from` and `to` are what the row of each sees of it, `group` queries a row.
static void attend_tiles(const Attention *all, Queries queries, int64_t count, const int *from, const int *to, int64_t group,
                         BlockTiles tiles)
{
    const int64_t key_bytes = 2 * all->key_size;
    for (int64_t first = 0; first < count; first += TILE_ROWS) {
        const int64_t num = count - first < TILE_ROWS ? count - first : TILE_ROWS;
        float scores[TILE_ROWS][BLOCK] __attribute__((aligned(64))), shrinks[TILE_ROWS];
        uint16_t weights[TILE_ROWS][BLOCK] __attribute__((aligned(64)));
        const char *numbers = (const char *)queries.numbers + first * key_bytes;
        written(numbers);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t chunk = 0; chunk < all->key_size / 32; chunk++) {
            const uint32_t *keys = tiles.keys + 256 * NUM_STEPS * chunk;
            _tile_loadd(4, numbers + 64 * chunk, key_bytes);
            _tile_loadd(5, keys, 64);
            _tile_loadd(6, keys + 256, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(5, keys + 512, 64);
            _tile_loadd(6, keys + 768, 64);
            _tile_dpbf16ps(2, 4, 5);
            _tile_dpbf16ps(3, 4, 6);
        }
        _tile_stored(0, scores[0], sizeof scores[0]);
        _tile_stored(1, scores[0] + 16, sizeof scores[0]);
        _tile_stored(2, scores[0] + 32, sizeof scores[0]);
        _tile_stored(3, scores[0] + 48, sizeof scores[0]);
        written(scores);
        memset(weights[num], 0, sizeof weights[0] * (size_t)(TILE_ROWS - num));
        for (int64_t query = 0; query < num; query++) {
            const int64_t row = (first + query) / group;
            shrinks[query] = weigh_row(all, scores[query], from[row], to[row], queries.states + first + query, weights[query]);
        }
        written(weights);
        _tile_loadd(4, weights[0], sizeof weights[0]);
        _tile_loadd(5, weights[0] + 32, sizeof weights[0]);
        for (int64_t number = 0; number < all->value_size; number += 32) {
            const uint32_t *values = tiles.values + 16 * number, *later = values + 16 * all->value_size;
            _tile_zero(0);
            _tile_zero(1);
            _tile_loadd(6, values, 64);
            _tile_loadd(7, values + 256, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, later, 64);
            _tile_loadd(7, later + 256, 64);
            _tile_dpbf16ps(0, 5, 6);
            _tile_dpbf16ps(1, 5, 7);
            float added[TILE_ROWS][32] __attribute__((aligned(64)));
            _tile_stored(0, added[0], sizeof added[0]);
            _tile_stored(1, added[0] + 16, sizeof added[0]);
            written(added);
            for (int64_t query = 0; query < num; query++) {
                float *sums = queries.sums + (first + query) * all->value_size + number;
                for (int half = 0; half < 2; half++) {
                    const floats_16 sum = at_16(sums, half) * shrinks[query] + at_16(added[query], half);
                    memcpy(sums + 16 * half, &sum, sizeof sum);
                }
            }
        }
    }
}

// Attend for some rows of one text, as attend_rows_16 does.
static void attend_rows_tiles(const Attention *all, const Row *rows, int num_rows, int64_t next, float *room)
{
    const int64_t key_size = all->key_size, value_size = all->value_size, num_kv_heads = all->num_kv_heads;
    const int64_t group = all->num_heads / num_kv_heads, count = num_rows * group;
    const BlockTiles tiles = {(uint32_t *)room, (uint32_t *)room + BLOCK * key_size / 2};
    float *sums = (float *)(tiles.values + BLOCK * value_size / 2);
    State *states = (State *)(sums + count * num_kv_heads * value_size);
    uint16_t *numbers = (uint16_t *)(states + count * num_kv_heads);
    memset(sums, 0, sizeof(float) * (size_t)(count * num_kv_heads * value_size));
    int64_t begin = first_seen(all, rows), end = 0;
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t head = 0; head < all->num_heads; head++) {
            const int64_t place = head / group * count + row * group + head % group;
            memcpy(numbers + place * key_size,
                   (const uint16_t *)all->query + rows[row].token * all->query_stride + head * key_size, (size_t)(2 * key_size));
            states[place].most = all->sinks ? all->sinks[head] : LEAST;
            states[place].totals[0] = all->sinks ? 1 : 0;
        }
        begin = first_seen(all, rows + row) < begin ? first_seen(all, rows + row) : begin;
        end = rows[row].end > end ? rows[row].end : end;
    }
    const char *keys[BLOCK], *values[BLOCK];
    for (int64_t first = begin / BLOCK * BLOCK; first < end; first += BLOCK) {
        int from[MAX_ROWS], to[MAX_ROWS], own_from[MAX_ROWS], own_to[MAX_ROWS];
        int64_t low = BLOCK, high = 0;  // what the rows see of the block that lies in a row
        for (int row = 0; row < num_rows; row++) {
            const int64_t seen = first_seen(all, rows + row) - first, last = rows[row].end - first;
            const int64_t linear = rows[row].num_linear - first;
            own_from[row] = seen > 0 ? (int)(seen < BLOCK ? seen : BLOCK) : 0;
            own_to[row] = last < BLOCK ? (int)(last > 0 ? last : 0) : BLOCK;
            const int is_own = own_to[row] > linear;  // its path goes through the block
            from[row] = is_own ? BLOCK : own_from[row];
            to[row] = is_own ? 0 : own_to[row];
            if (!is_own)
                own_from[row] = BLOCK, own_to[row] = 0;
            if (from[row] < to[row]) {
                low = from[row] < low ? from[row] : low;
                high = to[row] > high ? to[row] : high;
            }
        }
        const int64_t later = first + BLOCK < end ? rows[0].first_slot + first + BLOCK : next;
        for (int64_t kv_head = 0; kv_head < num_kv_heads; kv_head++) {
            const char *own_keys = (const char *)all->keys + 2 * kv_head * key_size;
            const char *own_values = (const char *)all->values + 2 * kv_head * value_size;
            const int64_t first_query = kv_head * count;
#define QUERIES(row)                                                                                                   \
    (Queries){numbers + (first_query + (row) * group) * key_size, sums + (first_query + (row) * group) * value_size,   \
              states + first_query + (row) * group}
#define LEAD(index, slot)                                                                                              \
    keys[index] = own_keys + 2 * (slot) * all->slot_heads * key_size;                                                     \
    values[index] = own_values + 2 * (slot) * all->slot_heads * value_size;
            for (int index = 0; index < BLOCK; index++)
                fetch(all, later + index, kv_head, 1);
            if (low < high) {
                for (int index = 0; index < BLOCK; index++)
                    if (index < low || index >= high)
                        keys[index] = values[index] = no_numbers;
                    else {
                        LEAD(index, rows[0].first_slot + first + index)
                    }
                arrange(all, keys, values, tiles);
                attend_tiles(all, QUERIES(0), count, from, to, group, tiles);
            }
            for (int row = 0; row < num_rows; row++) {
                if (own_from[row] >= own_to[row])
                    continue;
                for (int index = 0; index < BLOCK; index++) {
                    const int64_t position = first + index;
                    if (index < own_from[row] || index >= own_to[row])
                        keys[index] = values[index] = no_numbers;
                    else if (position < rows[row].num_linear) {
                        LEAD(index, rows[row].first_slot + position)
                    } else {
                        LEAD(index, slot_on_path(all, rows + row, position))
                    }
                }
                arrange(all, keys, values, tiles);
                attend_tiles(all, QUERIES(row), group, own_from + row, own_to + row, group, tiles);
            }
#undef LEAD
#undef QUERIES
        }
    }
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t head = 0; head < all->num_heads; head++) {
            const int64_t place = head / group * count + row * group + head % group;
            const int64_t output = (rows[row].token * all->output_heads + head) * value_size;
            for (int64_t number = 0; number < value_size; number += 16)
                write_16(all->output, output + number, at_16(sums + place * value_size + number, 0) / states[place].totals[0], 16,
                         1);
        }
}

static void attend_all_tiles(const Attention *all, const Row *rows, int64_t num_rows, float *room)
{
    set_tiles(TILE_ROWS);
    for (int64_t index = 0; index < num_rows;) {
        const int count = num_of_one_text(rows + index, num_rows - index);
        const Row *next = rows + (index + count < num_rows ? index + count : index);
        attend_rows_tiles(all, rows + index, count, next->first_slot + first_seen(all, next) / BLOCK * BLOCK, room);
        index += count;
    }
    _tile_release();
}
