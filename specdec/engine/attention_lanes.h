// Attention for one width of vectors: included by attention_kernel.c once for each, with LANES and NAME(x) defined.

#include "lanes.h"

// Add neighbours' halves, pair by pair: half as many vectors, each with the parts of twice as many sums.
#define HALVE(count, first, second)                                                                                  \
    UNROLLED for (int i = 0; i < (count) / 2; i++)                                                                   \
        parts[i] = SHUFFLE(parts[2 * i], parts[2 * i + 1], first) + SHUFFLE(parts[2 * i], parts[2 * i + 1], second);

// Return one vector with the parts of LANES / 4 vectors' sums, in their order.
static ALWAYS_INLINE FLOATS NAME(first_sums)(FLOATS *parts)
{
#if LANES == 16
    HALVE(4, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
          LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
    HALVE(2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
          LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#elif LANES == 8
    HALVE(2, LIST(0, 8, 2, 10, 4, 12, 6, 14), LIST(1, 9, 3, 11, 5, 13, 7, 15))
#endif
    return parts[0];
}

// Return LANES sums, of which four vectors have the parts.
static ALWAYS_INLINE FLOATS NAME(last_sums)(FLOATS *parts)
{
#if LANES == 16
    HALVE(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
          LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    HALVE(2, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
          LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#elif LANES == 8
    HALVE(4, LIST(0, 1, 8, 9, 4, 5, 12, 13), LIST(2, 3, 10, 11, 6, 7, 14, 15))
    HALVE(2, LIST(0, 1, 2, 3, 8, 9, 10, 11), LIST(4, 5, 6, 7, 12, 13, 14, 15))
#else
    HALVE(4, LIST(0, 4, 2, 6), LIST(1, 5, 3, 7))
    HALVE(2, LIST(0, 1, 4, 5), LIST(2, 3, 6, 7))
#endif
    return parts[0];
}
#undef HALVE

// Score a block's keys for `tile` queries: scores[tile][count, rounded up to LANES]; raise `most` to the largest.
static ALWAYS_INLINE void NAME(score)(const Attention *all, const float *query, const float *const *keys, int count,
                                      float (*scores)[BLOCK], float *most, const int chunks, const int tile)
{
    FLOATS largest[4];
    UNROLLED for (int head = 0; head < tile; head++)
        largest[head] = (FLOATS){0} + most[head];
    for (int first = 0; first < count; first += LANES) {
        FLOATS parts[4][4];
        UNROLLED for (int quarter = 0; quarter < 4; quarter++) {
            const float *const *own = keys + first + quarter * (LANES / 4);
            FLOATS products[4][LANES / 4] = {0};
            for (int chunk = 0; chunk < chunks; chunk++)
                UNROLLED for (int lane = 0; lane < LANES / 4; lane++) {
                    const FLOATS numbers = NAME(at)(own[lane], chunk);
                    UNROLLED for (int head = 0; head < tile; head++)
                        products[head][lane] += NAME(at)(query, head * chunks + chunk) * numbers;
                }
            UNROLLED for (int head = 0; head < tile; head++)
                parts[head][quarter] = NAME(first_sums)(products[head]);
        }
        UNROLLED for (int head = 0; head < tile; head++) {
            FLOATS found = NAME(last_sums)(parts[head]) * all->scaling;
            if (all->softcap > 0)
                for (int lane = 0; lane < LANES; lane++)
                    found[lane] = tanhf(found[lane] / all->softcap) * all->softcap;
            for (int lane = count - first; lane < LANES; lane++)
                found[lane] = LEAST;
            largest[head] = NAME(larger)(largest[head], found);
            memcpy(scores[head] + first, &found, sizeof found);
        }
    }
    UNROLLED for (int head = 0; head < tile; head++)
        most[head] = NAME(largest_of)(largest[head]);
}

// Turn scores into weights relative to e^most; shrink the totals, and add them, lane by lane.
static ALWAYS_INLINE void NAME(weigh)(float *scores, int count, float most, float shrink, float *totals)
{
    FLOATS sums = NAME(at)(totals, 0) * shrink;
    for (int first = 0; first < count; first += LANES) {
        const FLOATS weights = NAME(exponential)(NAME(at)(scores + first, 0) - most);
        memcpy(scores + first, &weights, sizeof weights);
        sums += weights;
    }
    memcpy(totals, &sums, sizeof sums);
}

// Add a block's weighted values to some neighbouring chunks of `tile` heads' sums, after shrinking those.
static ALWAYS_INLINE void NAME(add_values)(float *sum, int value_chunks, const float (*scores)[BLOCK],
                                           const float *shrinks, const float *const *values, int chunk, int count,
                                           const int tile, const int num_chunks)
{
    FLOATS sums[4][VALUE_CHUNKS];
    UNROLLED for (int head = 0; head < tile; head++)
        UNROLLED for (int part = 0; part < num_chunks; part++)
            sums[head][part] = NAME(at)(sum, head * value_chunks + chunk + part) * shrinks[head];
    for (int index = 0; index < count; index++)
        UNROLLED for (int part = 0; part < num_chunks; part++) {
            const FLOATS numbers = NAME(at)(values[index], chunk + part);
            UNROLLED for (int head = 0; head < tile; head++)
                sums[head][part] += scores[head][index] * numbers;
        }
    UNROLLED for (int head = 0; head < tile; head++)
        UNROLLED for (int part = 0; part < num_chunks; part++)
            memcpy(sum + (head * value_chunks + chunk + part) * LANES, &sums[head][part], sizeof(FLOATS));
}

// Go through one block of keys and values for `tile` query heads that share them.
static ALWAYS_INLINE void NAME(attend_block)(const Attention *all, const float *query, float *sum, State *states,
                                             const float *const *keys, const float *const *values, int count,
                                             const int key_chunks, const int value_chunks, const int tile)
{
    float scores[4][BLOCK], shrinks[4], most[4];
    UNROLLED for (int head = 0; head < tile; head++)
        most[head] = states[head].most;
    NAME(score)(all, query, keys, count, scores, most, key_chunks, tile);
    UNROLLED for (int head = 0; head < tile; head++) {
        shrinks[head] = NAME(exponential)((FLOATS){0} + (states[head].most - most[head]))[0];
        states[head].most = most[head];
        NAME(weigh)(scores[head], count, most[head], shrinks[head], states[head].totals);
    }
    int chunk = 0;
    for (; chunk + VALUE_CHUNKS <= value_chunks; chunk += VALUE_CHUNKS)
        NAME(add_values)(sum, value_chunks, scores, shrinks, values, chunk, count, tile, VALUE_CHUNKS);
    for (; chunk < value_chunks; chunk++)
        NAME(add_values)(sum, value_chunks, scores, shrinks, values, chunk, count, tile, 1);
}

// Let a block's pointers at `index` lead to a slot's key and value, or to copies of them as floats.
static ALWAYS_INLINE void NAME(lead)(const Attention *all, Block *block, int64_t index, int64_t slot, int64_t kv_head,
                                     float *copies, const int is_copied, const int is_bf16)
{
    const int64_t place = slot * all->num_kv_heads + kv_head;
    const int key_size = (int)all->key_size, value_size = (int)all->value_size;
    if (!is_copied) {
        block->keys[index] = (const float *)all->keys + place * key_size;
        block->values[index] = (const float *)all->values + place * value_size;
        return;
    }
    const int key_width = (key_size + LANES - 1) / LANES * LANES, value_width = (value_size + LANES - 1) / LANES * LANES;
    float *key = copies + index * (key_width + value_width), *value = key + key_width;
    NAME(copy)(key, all->keys, place * key_size, key_size, is_bf16);
    NAME(copy)(value, all->values, place * value_size, value_size, is_bf16);
    block->keys[index] = key;
    block->values[index] = value;
}

// Attend for some rows of one text, each from its own first position to its own last; `next` is the first slot of what is
// read afterwards.
static ALWAYS_INLINE void NAME(attend_rows)(const Attention *all, const Row *rows, const int num_rows, int64_t next,
                                            float *room, const int is_copied, const int is_bf16)
{
    const int key_size = (int)all->key_size, value_size = (int)all->value_size;
    const int key_chunks = (key_size + LANES - 1) / LANES, value_chunks = (value_size + LANES - 1) / LANES;
    const int key_width = key_chunks * LANES, value_width = value_chunks * LANES;
    const int num_heads = (int)all->num_heads, group = num_heads / (int)all->num_kv_heads;
    float *queries = room, *sums = queries + num_rows * num_heads * key_width;
    float *copies = sums + num_rows * num_heads * value_width, *own_copies = copies + BLOCK * (key_width + value_width);
    State *states = (State *)(own_copies + BLOCK * (key_width + value_width));
    Block shared, own;
    for (int head = 0; head < num_rows * num_heads; head++) {
        const int64_t token = rows[head / num_heads].token, number = head % num_heads;
        NAME(copy)(queries + head * key_width, all->query, token * all->query_stride + number * key_size, key_size,
                   is_bf16);
        states[head].most = all->sinks ? all->sinks[number] : LEAST;
        memset(states[head].totals, 0, sizeof states[head].totals);
        states[head].totals[0] = all->sinks ? 1 : 0;
    }
    memset(sums, 0, sizeof(float) * (size_t)(num_rows * num_heads * value_width));
    const int64_t first_slot = rows[0].first_slot;
    int64_t begin = first_seen(all, rows), end = 0, linear = 0;
    for (int row = 0; row < num_rows; row++) {
        begin = first_seen(all, rows + row) < begin ? first_seen(all, rows + row) : begin;
        end = rows[row].end > end ? rows[row].end : end;
        linear = rows[row].num_linear > linear ? rows[row].num_linear : linear;
    }
    for (int64_t first = begin / BLOCK * BLOCK; first < end; first += BLOCK) {
        const int64_t low = first > begin ? first : begin, high = first + BLOCK < linear ? first + BLOCK : linear;
        const int64_t later = first + BLOCK < linear ? first_slot + first + BLOCK : next;
        for (int kv_head = 0; kv_head < all->num_kv_heads; kv_head++) {
            for (int64_t position = low; position < high; position++) {
                fetch(all, later, kv_head * BLOCK + position - first, is_bf16);
                NAME(lead)(all, &shared, position - low, first_slot + position, kv_head, copies, is_copied, is_bf16);
            }
            pad(&shared, high - low);
            for (int row = 0; row < num_rows; row++) {
                const int64_t seen = first_seen(all, rows + row), from = low > seen ? low : seen;
                const int64_t to = first + BLOCK < rows[row].end ? first + BLOCK : rows[row].end;
                if (from >= to)
                    continue;
                const float *const *keys = shared.keys + (from - low), *const *values = shared.values + (from - low);
                if (to > rows[row].num_linear) {
                    for (int64_t position = from; position < to; position++)
                        if (position < rows[row].num_linear) {
                            own.keys[position - from] = shared.keys[position - low];
                            own.values[position - from] = shared.values[position - low];
                        } else
                            NAME(lead)(all, &own, position - from, slot_on_path(all, rows + row, position), kv_head,
                                       own_copies, is_copied, is_bf16);
                    pad(&own, to - from);
                    keys = own.keys, values = own.values;
                }
                for (int head = kv_head * group, last = head + group; head < last;) {
                    const int tile = last - head < 4 ? last - head : 4, place = row * num_heads + head;
#define TILE(number)                                                                                                   \
    case number:                                                                                                       \
        NAME(attend_block)(all, queries + place * key_width, sums + place * value_width, states + place, keys, values, \
                           (int)(to - from), key_chunks, value_chunks, number);                                        \
        break;
                    switch (tile) { TILE(1) TILE(2) TILE(3) TILE(4) }
#undef TILE
                    head += tile;
                }
            }
        }
    }
    for (int head = 0; head < num_rows * num_heads; head++) {
        const int64_t place = rows[head / num_heads].token * num_heads + head % num_heads;
        const float total = NAME(sum_of)(NAME(at)(states[head].totals, 0));
        for (int chunk = 0; chunk < value_chunks; chunk++) {
            const int left = value_size - chunk * LANES;
            NAME(write)(all->output, place * value_size + chunk * LANES, NAME(at)(sums + head * value_width, chunk) / total,
                        left < LANES ? left : LANES, is_bf16);
        }
    }
}

static void NAME(attend)(const Attention *all, const Row *rows, int64_t num_rows, float *room)
{
    const int is_copied = all->key_size % LANES || all->value_size % LANES;
    for (int64_t index = 0; index < num_rows;) {
        const int count = num_of_one_text(rows + index, num_rows - index);
        const Row *next = rows + (index + count < num_rows ? index + count : index);
        const int64_t slot = next->first_slot + first_seen(all, next) / BLOCK * BLOCK;
        if (all->is_bf16)
            NAME(attend_rows)(all, rows + index, count, slot, room, 1, 1);
        else if (is_copied)
            NAME(attend_rows)(all, rows + index, count, slot, room, 1, 0);
        else
            NAME(attend_rows)(all, rows + index, count, slot, room, 0, 0);
        index += count;
    }
}

#undef FLOATS
#undef INTS
#undef LANES
#undef NAME
