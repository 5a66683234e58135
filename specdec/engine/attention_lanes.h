// Attention for one width of vectors: included by attention_kernel.c once for each, with LANES and NAME(x) defined.

typedef float NAME(floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(words) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(halves) __attribute__((vector_size(2 * LANES)));
#define FLOATS NAME(floats)
#define INTS NAME(ints)

// Copy LANES numbers as floats; a bfloat16 is the upper half of a float.
static ALWAYS_INLINE void NAME(convert)(float *copied, const void *numbers, const int is_bf16)
{
    if (is_bf16) {
        NAME(halves) halves;
        memcpy(&halves, numbers, sizeof halves);
        const NAME(words) words = __builtin_convertvector(halves, NAME(words)) << 16;
        memcpy(copied, &words, sizeof words);
    } else
        memcpy(copied, numbers, sizeof(FLOATS));
}

// Copy numbers as floats, and zeros up to a multiple of LANES.
static ALWAYS_INLINE void NAME(copy)(float *copied, const void *numbers, int64_t first, int count, const int is_bf16)
{
    const char *from = (const char *)numbers + first * (is_bf16 ? 2 : 4);
    int done = 0;
    for (; done + LANES <= count; done += LANES)
        NAME(convert)(copied + done, from + done * (is_bf16 ? 2 : 4), is_bf16);
    if (done < count) {
        char rest[4 * LANES] = {0};
        for (int byte = 0; byte < (count - done) * (is_bf16 ? 2 : 4); byte++)
            rest[byte] = from[done * (is_bf16 ? 2 : 4) + byte];
        NAME(convert)(copied + done, rest, is_bf16);
    }
}

static ALWAYS_INLINE FLOATS NAME(at)(const float *numbers, int chunk)
{
    FLOATS floats;
    memcpy(&floats, numbers + chunk * LANES, sizeof floats);
    return floats;
}

// e^x to 2 units in the last place, for x from -86 to 0; less is -86, NaN stays NaN (polynomial: Moshier, Cephes, expf).
static ALWAYS_INLINE FLOATS NAME(exponential)(FLOATS x)
{
    const FLOATS least = {0}, rounder = {0};
    const INTS is_less = x < least - 86.0f;
    x = (FLOATS)((is_less & (INTS)(least - 86.0f)) | (~is_less & (INTS)x));
    const FLOATS shifted = x * 1.44269504088896341f + (rounder + 12582912.0f);
    const INTS power = (INTS)shifted - (INTS)(rounder + 12582912.0f);
    const FLOATS rounded = shifted - 12582912.0f;
    const FLOATS rest = x - rounded * 0.693359375f - rounded * -2.12194440e-4f;
    FLOATS sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * (FLOATS)((power + 127) << 23);
}

static ALWAYS_INLINE float NAME(exponential_of_one)(float x)
{
    FLOATS all = {0};
    all = NAME(exponential)(all + x);
    return all[0];
}

// Return the sum of each of LANES vectors, in their order: neighbours' halves are added, pair by pair.
static ALWAYS_INLINE FLOATS NAME(sums)(FLOATS *parts)
{
#define HALVE(count, first, second)                                                                                  \
    UNROLLED for (int i = 0; i < (count) / 2; i++)                                                                   \
        parts[i] = SHUFFLE(parts[2 * i], parts[2 * i + 1], first) + SHUFFLE(parts[2 * i], parts[2 * i + 1], second);
#if LANES == 16
    HALVE(16, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
          LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
    HALVE(8, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
          LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    HALVE(4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
          LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    HALVE(2, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
          LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#elif LANES == 8
    HALVE(8, LIST(0, 8, 2, 10, 4, 12, 6, 14), LIST(1, 9, 3, 11, 5, 13, 7, 15))
    HALVE(4, LIST(0, 1, 8, 9, 4, 5, 12, 13), LIST(2, 3, 10, 11, 6, 7, 14, 15))
    HALVE(2, LIST(0, 1, 2, 3, 8, 9, 10, 11), LIST(4, 5, 6, 7, 12, 13, 14, 15))
#else
    HALVE(4, LIST(0, 4, 2, 6), LIST(1, 5, 3, 7))
    HALVE(2, LIST(0, 1, 4, 5), LIST(2, 3, 6, 7))
#endif
#undef HALVE
    return parts[0];
}

// Score the keys of a block for one query: scores[count, rounded up to LANES]; return the largest, or `most`.
static ALWAYS_INLINE float NAME(score)(const Attention *all, const float *query, const float *const *keys, int count,
                                       float *scores, float most, const int chunks)
{
    FLOATS largest = {0};
    largest += most;
    for (int first = 0; first < count; first += LANES) {
        FLOATS parts[LANES];
        UNROLLED for (int lane = 0; lane < LANES; lane++)
            parts[lane] = NAME(at)(query, 0) * NAME(at)(keys[first + lane], 0);
        for (int chunk = 1; chunk < chunks; chunk++) {
            const FLOATS numbers = NAME(at)(query, chunk);
            UNROLLED for (int lane = 0; lane < LANES; lane++)
                parts[lane] += numbers * NAME(at)(keys[first + lane], chunk);
        }
        FLOATS found = NAME(sums)(parts) * all->scaling;
        if (all->softcap > 0)
            for (int lane = 0; lane < LANES; lane++)
                found[lane] = tanhf(found[lane] / all->softcap) * all->softcap;
        for (int lane = count - first; lane < LANES; lane++)
            found[lane] = LEAST;
        const INTS is_larger = found > largest;
        largest = (FLOATS)((is_larger & (INTS)found) | (~is_larger & (INTS)largest));
        memcpy(scores + first, &found, sizeof found);
    }
    for (int lane = 0; lane < LANES; lane++)
        most = largest[lane] > most ? largest[lane] : most;
    return most;
}

// Turn scores into weights relative to e^most; return their sum.
static ALWAYS_INLINE float NAME(weigh)(float *scores, int count, float most)
{
    FLOATS total = {0};
    for (int first = 0; first < count; first += LANES) {
        const FLOATS weights = NAME(exponential)(NAME(at)(scores + first, 0) - most);
        memcpy(scores + first, &weights, sizeof weights);
        total += weights;
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++)
        sum += total[lane];
    return sum;
}

// Go through one block of keys and values for `tile` query heads that share them.
static ALWAYS_INLINE void NAME(attend_block)(const Attention *all, const float *query, float *sum, State *states,
                                             const float *const *keys, const float *const *values, int count,
                                             const int key_chunks, const int value_chunks, const int tile)
{
    float scores[4][BLOCK], shrinks[4];
    UNROLLED for (int head = 0; head < tile; head++) {
        State *state = states + head;
        const float most =
            NAME(score)(all, query + head * key_chunks * LANES, keys, count, scores[head], state->most, key_chunks);
        const FLOATS nothing = {0};
        shrinks[head] = NAME(exponential)(nothing + (state->most - most))[0];
        state->most = most;
        state->total = state->total * shrinks[head] + NAME(weigh)(scores[head], count, most);
    }
    for (int chunk = 0; chunk < value_chunks; chunk++) {
        FLOATS sums[4];
        UNROLLED for (int head = 0; head < tile; head++)
            sums[head] = NAME(at)(sum, head * value_chunks + chunk) * shrinks[head];
        for (int index = 0; index < count; index++) {
            const FLOATS numbers = NAME(at)(values[index], chunk);
            UNROLLED for (int head = 0; head < tile; head++)
                sums[head] += scores[head][index] * numbers;
        }
        UNROLLED for (int head = 0; head < tile; head++)
            memcpy(sum + (head * value_chunks + chunk) * LANES, &sums[head], sizeof(FLOATS));
    }
}

// Attend for some rows that see the same slots, each from its own first position to its own last.
static ALWAYS_INLINE void NAME(attend_rows)(const Attention *all, const Row *rows, const int num_rows, float *room,
                                            const int is_copied, const int is_bf16)
{
    const int key_size = (int)all->key_size, value_size = (int)all->value_size;
    const int key_chunks = (key_size + LANES - 1) / LANES, value_chunks = (value_size + LANES - 1) / LANES;
    const int key_width = key_chunks * LANES, value_width = value_chunks * LANES;
    const int num_heads = (int)all->num_heads, group = num_heads / (int)all->num_kv_heads;
    float *queries = room, *sums = queries + num_rows * num_heads * key_width;
    State *states = (State *)(sums + num_rows * num_heads * value_width);
    float *key_copies = (float *)(states + num_rows * num_heads), *value_copies = key_copies + BLOCK * key_width;
    const float *keys[BLOCK + LANES], *values[BLOCK];
    for (int head = 0; head < num_rows * num_heads; head++) {
        const int64_t token = rows[head / num_heads].token, number = head % num_heads;
        NAME(copy)(queries + head * key_width, all->query, token * all->query_stride + number * key_size, key_size,
                   is_bf16);
        states[head].most = all->sinks ? all->sinks[number] : LEAST;
        states[head].total = all->sinks ? 1 : 0;
    }
    memset(sums, 0, sizeof(float) * (size_t)(num_rows * num_heads * value_width));
    const int64_t begin = first_seen(all, rows), end = rows[num_rows - 1].end;
    for (int64_t first = begin / BLOCK * BLOCK; first < end; first += BLOCK) {
        const int64_t low = first > begin ? first : begin, high = first + BLOCK < end ? first + BLOCK : end;
        for (int kv_head = 0; kv_head < all->num_kv_heads; kv_head++) {
            for (int64_t position = low; position < high; position++) {
                const int64_t index = position - low;
                const int64_t slot = slot_of(all, rows + num_rows - 1, position) * all->num_kv_heads + kv_head;
                if (is_copied) {
                    keys[index] = key_copies + index * key_width;
                    values[index] = value_copies + index * value_width;
                    NAME(copy)(key_copies + index * key_width, all->keys, slot * key_size, key_size, is_bf16);
                    NAME(copy)(value_copies + index * value_width, all->values, slot * value_size, value_size, is_bf16);
                } else {
                    keys[index] = (const float *)all->keys + slot * key_size;
                    values[index] = (const float *)all->values + slot * value_size;
                }
            }
            for (int64_t index = high - low; index < BLOCK + LANES; index++)
                keys[index] = keys[0];  // scored, and not counted
            for (int row = 0; row < num_rows; row++) {
                const int64_t seen = first_seen(all, rows + row), from = low > seen ? low : seen;
                const int64_t to = high < rows[row].end ? high : rows[row].end;
                for (int head = kv_head * group, last = head + group; from < to && head < last;) {
                    const int tile = last - head < 4 ? last - head : 4, own = row * num_heads + head;
#define TILE(number)                                                                                             \
    case number:                                                                                                 \
        NAME(attend_block)(all, queries + own * key_width, sums + own * value_width, states + own,               \
                           keys + (from - low), values + (from - low), (int)(to - from), key_chunks, value_chunks, \
                           number);                                                                              \
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
        for (int index = 0; index < value_size; index++)
            write(all->output, place * value_size + index, sums[head * value_width + index] / states[head].total, is_bf16);
    }
}

static void NAME(attend)(const Attention *all, const Row *rows, int64_t num_rows, float *room)
{
    const int is_copied = all->key_size % LANES || all->value_size % LANES;
    for (int64_t index = 0; index < num_rows;) {
        const int count = num_neighbours(rows + index, num_rows - index);
        if (all->is_bf16)
            NAME(attend_rows)(all, rows + index, count, room, 1, 1);
        else if (is_copied)
            NAME(attend_rows)(all, rows + index, count, room, 1, 0);
        else
            NAME(attend_rows)(all, rows + index, count, room, 0, 0);
        index += count;
    }
}

#undef FLOATS
#undef INTS
#undef LANES
#undef NAME
