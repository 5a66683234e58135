// What a target reads and draws from rows of logits, in one call for all rows of a batch.
//
// After a forward the caches are full of weights: twenty calls of small functions take a millisecond there, and as many
// numbers take some microseconds. Sums are float64, of chunks first, then within the one that is drawn. A row's results
// depend on that row alone.

#include "kernels.h"

#define CHUNK 128
#define MAX_FOUND 64
#define LEAST_POWER 86.0f // e^-86 of the largest weight is taken for nothing

// Rows [num_rows, size], `stride` numbers apart; of each the listed tokens are read, and one is drawn from the others.
typedef struct {
    const float *rows;
    int64_t stride, size, num_rows;
    const float *temperatures; // [num_rows] of logits; 0: the largest one has it all; less: a row of probabilities
    const int64_t *ends;       // [num_rows]: where each row's listed tokens end
    const int64_t *listed;     // [ends[num_rows - 1]], each once in a row
    const double *uniforms;    // [num_rows]
    float *probs;              // [ends[num_rows - 1]]: what is read
    float *masses;             // [num_rows]: the others' probability; NaN where a row is no distribution
    int64_t *drawn;            // [num_rows]; 0 where no other token has a probability
    int64_t lanes;
} Draws;

static int64_t num_chunks(int64_t size)
{
    return (size + CHUNK - 1) / CHUNK;
}

// Put a number among those found, largest first, in place of the last of `last` + 1; after its equals.
static void put_among(float *found, int32_t *places, int last, float number, int64_t place)
{
    int index = last;
    for (; index > 0 && !(found[index - 1] >= number); index--) {
        found[index] = found[index - 1];
        places[index] = places[index - 1];
    }
    found[index] = number;
    places[index] = (int32_t)place;
}

#ifdef HAS_VERSIONS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define LANES 16
#define NAME(x) x##_16
#include "rows_lanes.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define LANES 8
#define NAME(x) x##_8
#include "rows_lanes.h"
#pragma GCC pop_options
#endif
#define LANES 4
#define NAME(x) x##_4
#include "rows_lanes.h"

#ifdef HAS_VERSIONS
#define WITH_LANES(lanes, call, ...) \
    ((lanes) == 16 ? call##_16(__VA_ARGS__) : (lanes) == 8 ? call##_8(__VA_ARGS__) : call##_4(__VA_ARGS__))
#else
#define WITH_LANES(lanes, call, ...) call##_4(__VA_ARGS__)
#endif

// Return the first place at which `before` and the sum of the numbers so far are above the threshold, or else the last one
// with a weight: rounding does not step past it.
static int64_t first_above(const double *numbers, const float *weights, int64_t count, double before, double threshold)
{
    double sum = 0;
    int64_t last = 0;
    for (int64_t place = 0; place < count && before + sum <= threshold; place++) {
        const double number = numbers ? numbers[place] : weights[place];
        sum += number;
        if (number > 0)
            last = place;
    }
    return last;
}

static int64_t drawn_from(const float *weights, const double *sums, int64_t size, double threshold)
{
    const int64_t chunk = first_above(sums, NULL, num_chunks(size), 0, threshold);
    double before = 0;
    for (int64_t earlier = 0; earlier < chunk; earlier++)
        before += sums[earlier];
    return chunk * CHUNK + first_above(NULL, weights + chunk * CHUNK, CHUNK, before, threshold);
}

// The first largest number of a row; -1 where none is finite, or any is no number or infinite.
static int64_t most_probable(const float *row, int64_t size)
{
    int64_t best = -1;
    float most = -INFINITY;
    for (int64_t place = 0; place < size; place++) {
        if (row[place] > most)
            most = row[best = place];
        else if (row[place] != row[place])
            return -1;
    }
    return most < INFINITY ? best : -1;
}

static void draw_greedily(const Draws *all, int64_t row, int64_t first)
{
    const int64_t token = most_probable(all->rows + row * all->stride, all->size);
    int is_listed = 0;
    for (int64_t index = first; index < all->ends[row]; index++) {
        all->probs[index] = all->listed[index] == token;
        is_listed |= all->listed[index] == token;
    }
    all->masses[row] = token < 0 ? NAN : (float)!is_listed;
    all->drawn[row] = token < 0 || is_listed ? 0 : token;
}

static void draw_row(const Draws *all, int64_t row, int64_t first, float *weights, double *sums)
{
    const float temperature = all->temperatures[row];
    WITH_LANES(all->lanes, weigh, all->rows + row * all->stride, all->size, temperature, weights);
    double inside = 0, mass = 0;
    for (int64_t index = first; index < all->ends[row]; index++) {
        float *weight = weights + all->listed[index];
        inside += all->probs[index] = *weight;
        *weight = 0;
    }
    WITH_LANES(all->lanes, add_up, weights, all->size, sums);
    for (int64_t chunk = 0; chunk < num_chunks(all->size); chunk++)
        mass += sums[chunk];
    const double total = temperature < 0 ? 1 : inside + mass;
    for (int64_t index = first; index < all->ends[row]; index++)
        all->probs[index] = (float)(all->probs[index] / total);
    all->drawn[row] = mass > 0 ? drawn_from(weights, sums, all->size, all->uniforms[row] * mass) : 0;
    all->masses[row] = (float)(mass / total + 0 * inside); // NaN where only a listed number is
}

// Return how many bytes `draw` needs beside its arguments.
int64_t specdec_draw_room(int64_t size)
{
    return num_chunks(size) * (CHUNK * (int64_t)sizeof(float) + (int64_t)sizeof(double));
}

// Read and draw. A row is no distribution if its mass is NaN; its other results are then some numbers.
void specdec_draw(const Draws *all, char *room)
{
    double *sums = (double *)room;
    float *weights = (float *)(sums + num_chunks(all->size));
    for (int64_t row = 0, first = 0; row < all->num_rows; first = all->ends[row++])
        if (all->temperatures[row] == 0)
            draw_greedily(all, row, first);
        else
            draw_row(all, row, first, weights, sums);
}

// Write the places of the `count` largest numbers of each row, the largest first; count is at most MAX_FOUND and `size`.
void specdec_find_largest(const float *rows, int64_t stride, int64_t size, int64_t num_rows, int64_t count,
                          int64_t lanes, int32_t *places)
{
    for (int64_t row = 0; row < num_rows; row++)
        WITH_LANES(lanes, find_largest, rows + row * stride, size, (int)count, places + row * count);
}
