// Reading and drawing from rows, with vectors of LANES floats: included once for each width.

#include "lanes.h"

typedef double NAME(doubles) __attribute__((vector_size(8 * LANES)));
typedef uint64_t NAME(counters) __attribute__((vector_size(8 * LANES)));

// Write a row's weights, and zeros up to whole chunks: its probabilities as they are, or e^((x - most) / temperature),
// and 0 for what is less than 1e-37 of the most. A row with a NaN or an infinity has a NaN.
static void NAME(weigh)(const float *row, int64_t size, float temperature, float *weights)
{
    const int64_t num_vectors = (size + LANES - 1) / LANES, padded = num_chunks(size) * CHUNK;
    memcpy(weights, row, sizeof(float) * (size_t)size);
    for (int64_t place = size; place < padded; place++)
        weights[place] = temperature < 0 ? 0 : -INFINITY;
    if (temperature < 0)
        return;
    FLOATS most = (FLOATS){0} - INFINITY;
    for (int64_t index = 0; index < num_vectors; index++)
        most = NAME(larger)(most, NAME(at)(weights, (int)index));
    const FLOATS largest = (FLOATS){0} + NAME(largest_of)(most);
    for (int64_t index = 0; index < num_vectors; index++) {
        const FLOATS power = (NAME(at)(weights, (int)index) - largest) / temperature;
        const INTS is_none = power < (FLOATS){0} - LEAST_POWER;
        const FLOATS weight = (FLOATS)(~is_none & (INTS)NAME(exponential)(power));
        memcpy(weights + index * LANES, &weight, sizeof weight);
    }
    for (int64_t place = size; place < padded; place++)
        weights[place] = 0; // also where all of a row is minus infinity
}

// Write the sum of each chunk of weights.
static void NAME(add_up)(const float *weights, int64_t size, double *sums)
{
    for (int64_t chunk = 0; chunk < num_chunks(size); chunk++) {
        NAME(doubles) total = {0};
        UNROLLED for (int index = 0; index < CHUNK / LANES; index++)
            total += __builtin_convertvector(NAME(at)(weights + chunk * CHUNK, index), NAME(doubles));
        double sum = 0;
        UNROLLED for (int lane = 0; lane < LANES; lane++)
            sum += total[lane];
        sums[chunk] = sum;
    }
}

// Write the places of the numbers from `least` on, in order; return how many there are, at most `most` + 1.
static int64_t NAME(find_from)(const float *row, int64_t size, float least, int64_t most, int64_t *places)
{
    int64_t count = 0, place = 0;
    for (; place < size; place++) {
        for (int32_t is_any = 0; place + LANES <= size; place += LANES) {
            const INTS is_enough = NAME(at)(row + place, 0) >= (FLOATS){0} + least;
            int32_t any[LANES];
            memcpy(any, &is_enough, sizeof any);
            UNROLLED for (int lane = 0; lane < LANES; lane++)
                is_any |= any[lane];
            if (is_any)
                break;
        }
        const int64_t end = place + LANES < size ? place + LANES : size;
        for (; place < end; place++)
            if (row[place] >= least) {
                if (count == most)
                    return count + 1;
                places[count++] = place;
            }
        place--;
    }
    return count;
}

// Write the first words of Threefry2x64-20 (Salmon et al. 2011) for a key (seed, place) and LANES counters (token, 0).
static void NAME(random_words)(uint64_t seed, uint64_t place, const int64_t *tokens, uint64_t *words)
{
    const uint64_t keys[] = {seed, place, 0x1BD11BDAA9FC1A22 ^ seed ^ place};
    NAME(counters) first, second = (NAME(counters)){0} + place;
    memcpy(&first, tokens, sizeof first);
    first += seed;
    for (int group = 1; group <= 5; group++) {
        UNROLLED for (int index = 0; index < 4; index++) {
            const int left = rotations[4 * (group % 2 == 0) + index];
            first += second;
            second = (second << left | second >> (64 - left)) ^ first;
        }
        first += keys[group % 3];
        second += keys[(group + 1) % 3] + (uint64_t)group;
    }
    memcpy(words, &first, sizeof first);
}

// Write the places of a row's `count` largest numbers, the largest first; of equals the first ones.
static void NAME(find_largest)(const float *row, int64_t size, int count, int32_t *places)
{
    float found[MAX_FOUND];
    for (int index = 0; index < count; index++)
        put_among(found, places, index, row[index], index);
    int64_t place = count;
    for (; place + LANES <= size; place += LANES) {
        const INTS is_larger = NAME(at)(row + place, 0) > (FLOATS){0} + found[count - 1];
        int32_t any[LANES], is_any = 0;
        memcpy(any, &is_larger, sizeof any);
        UNROLLED for (int lane = 0; lane < LANES; lane++)
            is_any |= any[lane];
        for (int lane = 0; is_any && lane < LANES; lane++)
            if (row[place + lane] > found[count - 1])
                put_among(found, places, count - 1, row[place + lane], place + lane);
    }
    for (; place < size; place++)
        if (row[place] > found[count - 1])
            put_among(found, places, count - 1, row[place], place);
}

#undef LANES
#undef NAME
