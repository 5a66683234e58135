// Attention for one width of vectors: included by attention_kernel.c once for each, with LANES, IS_PAIRED and NAME(x) defined.
//
// IS_PAIRED: keys and queries are multiplied as they are, two numbers of bfloat16 at a time, and 16 keys in one vector, for which
// a block of keys is turned once for all rows that see it. Else keys become floats, and a vector has one key's.

#include "lanes.h"

#if IS_PAIRED
typedef char NAME(Query);
typedef __m512i NAME(Keys);  // turned
#else
typedef float NAME(Query);
typedef const float *NAME(Keys);
#endif

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

// Take the scores of the LANES keys from `first` on, of which those before `count` are seen; raise `largest`.
static ALWAYS_INLINE void NAME(take)(const Attention *all, FLOATS found, float *scores, int first, int count, FLOATS *largest)
{
    found *= all->scaling;
    if (all->softcap > 0)
        for (int lane = 0; lane < LANES; lane++)
            found[lane] = tanhf(found[lane] / all->softcap) * all->softcap;
    for (int lane = count > first ? count - first : 0; lane < LANES; lane++)
        found[lane] = LEAST;
    *largest = NAME(larger)(*largest, found);
    memcpy(scores + first, &found, sizeof found);
}

#if IS_PAIRED
// Return where a block's turned keys lie, after the copies of its values, on a whole line.
static ALWAYS_INLINE __m512i *NAME(room_for_turned)(float *copies, int value_width)
{
    return (__m512i *)(((uintptr_t)(copies + BLOCK * value_width) + 63) / 64 * 64);
}

// Turn a block's keys, to `turned`: of each 16 the first pair of all, then the second. `num_pairs` is a multiple of 16.
static ALWAYS_INLINE void NAME(turn_block)(Block *block, int64_t count, __m512i *turned, int num_pairs)
{
    pad(block, count);
    for (int64_t first = 0; first < count; first += LANES) {
        const char *keys[LANES];
        for (int lane = 0; lane < LANES; lane++)
            keys[lane] = (const char *)block->keys[first + lane];
        for (int pair = 0; pair < num_pairs; pair += 16)
            transpose(keys, 4 * pair, (uint32_t *)(turned + first / LANES * num_pairs + pair));
    }
    block->turned = turned;
}

// Score `groups` times 16 turned keys, from `first` on, for `tile` queries.
static ALWAYS_INLINE void NAME(score_groups)(const Attention *all, const char *query, const __m512i *turned, int first, int count,
                                             float (*scores)[BLOCK], FLOATS *largest, const int tile, const int groups)
{
    const int num_pairs = (int)all->key_size / 2;
    __m512 sums[4][4];
    UNROLLED for (int head = 0; head < tile; head++)
        UNROLLED for (int group = 0; group < groups; group++)
            sums[head][group] = _mm512_setzero_ps();
    for (int index = 0; index < num_pairs; index++)
        UNROLLED for (int head = 0; head < tile; head++) {
            int32_t pair;
            memcpy(&pair, query + 4 * (head * num_pairs + index), sizeof pair);
            const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            UNROLLED for (int group = 0; group < groups; group++) {
                const __m512i keys = turned[(first / LANES + group) * num_pairs + index];
                sums[head][group] = _mm512_dpbf16_ps(sums[head][group], (__m512bh)keys, both);
            }
        }
    UNROLLED for (int head = 0; head < tile; head++)
        UNROLLED for (int group = 0; group < groups; group++)
            NAME(take)(all, (FLOATS)sums[head][group], scores[head], first + LANES * group, count, largest + head);
}

// Score a block's keys for `tile` queries: scores[tile][count, rounded up to LANES]; raise `most` to the largest.
static ALWAYS_INLINE void NAME(score)(const Attention *all, const NAME(Query) *query, const NAME(Keys) *turned, int count,
                                      float (*scores)[BLOCK], float *most, const int chunks, const int tile)
{
    (void)chunks;
    FLOATS largest[4];
    UNROLLED for (int head = 0; head < tile; head++)
        largest[head] = (FLOATS){0} + most[head];
    int first = 0;
    for (; first + 4 * LANES <= (count + LANES - 1) / LANES * LANES; first += 4 * LANES)
        NAME(score_groups)(all, query, turned, first, count, scores, largest, tile, 4);
    for (; first + LANES < count; first += 2 * LANES)
        NAME(score_groups)(all, query, turned, first, count, scores, largest, tile, 2);
    if (first < count)
        NAME(score_groups)(all, query, turned, first, count, scores, largest, tile, 1);
    UNROLLED for (int head = 0; head < tile; head++)
        most[head] = NAME(largest_of)(largest[head]);
}
#else
// Score a block's keys for `tile` queries: scores[tile][count, rounded up to LANES]; raise `most` to the largest.
static ALWAYS_INLINE void NAME(score)(const Attention *all, const NAME(Query) *query, const NAME(Keys) *keys, int count,
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
        UNROLLED for (int head = 0; head < tile; head++)
            NAME(take)(all, NAME(last_sums)(parts[head]), scores[head], first, count, largest + head);
    }
    UNROLLED for (int head = 0; head < tile; head++)
        most[head] = NAME(largest_of)(largest[head]);
}
#endif

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
static ALWAYS_INLINE void NAME(attend_block)(const Attention *all, const NAME(Query) *query, float *sum, State *states,
                                             const NAME(Keys) *keys, const float *const *values, int count,
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
    const int64_t place = slot * all->slot_heads + kv_head;
    const int key_size = (int)all->key_size, value_size = (int)all->value_size;
    if (!is_copied) {
        block->keys[index] = (const float *)all->keys + place * key_size;
        block->values[index] = (const float *)all->values + place * value_size;
        return;
    }
    const int value_width = (value_size + LANES - 1) / LANES * LANES;
#if IS_PAIRED
    float *value = copies + index * value_width;
    block->keys[index] = (const float *)((const char *)all->keys + 2 * place * key_size);
#else
    const int key_width = (key_size + LANES - 1) / LANES * LANES;
    float *key = copies + index * (key_width + value_width), *value = key + key_width;
    NAME(copy)(key, all->keys, place * key_size, key_size, is_bf16);
    block->keys[index] = key;
#endif
    NAME(copy)(value, all->values, place * value_size, value_size, is_bf16);
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
        if (!IS_PAIRED)
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
                fetch(all, later + position - first, kv_head, is_bf16);
                NAME(lead)(all, &shared, position - low, first_slot + position, kv_head, copies, is_copied, is_bf16);
            }
#if IS_PAIRED
            NAME(turn_block)(&shared, high - low, NAME(room_for_turned)(copies, value_width), key_size / 2);
#else
            pad(&shared, high - low);
#endif
            for (int row = 0; row < num_rows; row++) {
                const int64_t seen = first_seen(all, rows + row), from = low > seen ? low : seen;
                const int64_t to = first + BLOCK < rows[row].end ? first + BLOCK : rows[row].end;
                if (from >= to)
                    continue;
                const float *const *values = shared.values + (from - low);
#if IS_PAIRED
                const NAME(Query) *query = (const char *)all->query + 2 * rows[row].token * all->query_stride;
                const NAME(Keys) *keys = shared.turned; // no row begins within a block
                const int query_size = 2 * key_size;
#else
                const NAME(Query) *query = queries + row * num_heads * key_width;
                const NAME(Keys) *keys = shared.keys + (from - low);
                const int query_size = key_width;
#endif
                if (to > rows[row].num_linear) {
                    for (int64_t position = from; position < to; position++)
                        if (position < rows[row].num_linear) {
                            own.keys[position - from] = shared.keys[position - low];
                            own.values[position - from] = shared.values[position - low];
                        } else
                            NAME(lead)(all, &own, position - from, slot_on_path(all, rows + row, position), kv_head,
                                       own_copies, is_copied, is_bf16);
#if IS_PAIRED
                    NAME(turn_block)(&own, to - from, NAME(room_for_turned)(own_copies, value_width), key_size / 2);
                    keys = own.turned;
#else
                    pad(&own, to - from);
                    keys = own.keys;
#endif
                    values = own.values;
                }
                for (int head = kv_head * group, last = head + group; head < last;) {
                    const int tile = last - head < 4 ? last - head : 4, place = row * num_heads + head;
#define TILE(number)                                                                                                   \
    case number:                                                                                                       \
        NAME(attend_block)(all, query + head * query_size, sums + place * value_width, states + place, keys, values,   \
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
        const int64_t place = rows[head / num_heads].token * all->output_heads + head % num_heads;
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
#if IS_PAIRED
        (void)is_copied;
        NAME(attend_rows)(all, rows + index, count, slot, room, 1, 1);
#else
        if (all->is_bf16)
            NAME(attend_rows)(all, rows + index, count, slot, room, 1, 1);
        else if (is_copied)
            NAME(attend_rows)(all, rows + index, count, slot, room, 1, 0);
        else
            NAME(attend_rows)(all, rows + index, count, slot, room, 0, 0);
#endif
        index += count;
    }
}

#undef FLOATS
#undef INTS
#undef LANES
#undef IS_PAIRED
#undef NAME
