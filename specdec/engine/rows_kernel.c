// What a target reads and draws from rows of logits, in one call for all rows of a batch.
//
// After a forward the caches are full of weights: twenty calls of small functions take a millisecond there, and as many
// numbers take some microseconds. Sums are float64, of chunks first, then within the one that is drawn. A row's results
// depend on that row alone. Races are those of specdec/exact/race.py.

#include "kernels.h"

#define CHUNK 128
#define MAX_FOUND 64
#define LEAST_POWER 86.0f // e^-86 of the largest weight is taken for nothing
#define MIN_CHANCE 0x1p-14 // of all: a token that has less runs with the rest
#define MAX_RUNNERS 1024 // by themselves
#define MIN_GUESSED 0x1p-10 // a token to which a draft gives less is not guessed
#define REST INT64_MAX // runs in place of a token
#define WIDEST 16

static const int rotations[] = {16, 42, 12, 31, 16, 32, 24, 21}; // of Threefry2x64

// Rows [num_rows, size], `stride` numbers apart; of each the listed tokens are read, and one is drawn from the others.
typedef struct {
    const float *rows;
    int64_t stride, size, num_rows;
    const float *temperatures; // [num_rows] of logits; 0: the largest one has it all; less: a row of probabilities
    const int64_t *ends;       // [num_rows]: where each row's listed tokens end
    const int64_t *listed;     // [ends[num_rows - 1]], each once in a row
    const double *uniforms;    // [num_rows]
    const uint64_t *seeds;     // [num_rows]
    const int64_t *places;     // [num_rows]: of the races that come before the uniforms; -1: none, and none with a listed token
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

// The uniform number in (0, 1) of a word, of which a time is minus the logarithm.
static double unit(uint64_t word)
{
    return ((double)(word >> 12) + 0.5) * 0x1p-52;
}

static double time_of(const Draws *all, int64_t row, int64_t token)
{
    const int64_t tokens[WIDEST] = {token};
    uint64_t words[WIDEST];
    WITH_LANES(all->lanes, random_words, all->seeds[row], (uint64_t)all->places[row], tokens, words);
    return -log(unit(words[0]));
}

// Run a race among weights with this sum, and return who wins; those who ran by themselves are left without a weight.
static int64_t won(const Draws *all, int64_t row, float *weights, double *sums, double total, int64_t *runners)
{
    double least = MIN_CHANCE * total, best = INFINITY, rest = 0;
    int64_t count, winner = 0;
    while ((count = WITH_LANES(all->lanes, find_from, weights, all->size, (float)least, MAX_RUNNERS, runners)) > MAX_RUNNERS)
        least *= 2;
    for (int64_t begin = 0; begin < count; begin += all->lanes) {
        uint64_t words[WIDEST];
        WITH_LANES(all->lanes, random_words, all->seeds[row], (uint64_t)all->places[row], runners + begin, words);
        for (int64_t index = begin; index < count && index < begin + all->lanes; index++) {
            const double number = unit(words[index - begin]), weight = weights[runners[index]];
            if (1 - number < best * weight && -log(number) / weight < best) { // minus the logarithm of u is at least 1 - u
                best = -log(number) / weight;
                winner = runners[index];
            }
        }
    }
    for (int64_t index = 0; index < count; index++)
        weights[runners[index]] = 0;
    WITH_LANES(all->lanes, add_up, weights, all->size, sums);
    for (int64_t chunk = 0; chunk < num_chunks(all->size); chunk++)
        rest += sums[chunk];
    const int is_rest = rest > 0 && time_of(all, row, REST) / rest < best;
    return is_rest ? drawn_from(weights, sums, all->size, all->uniforms[row] * rest) : winner;
}

static void draw_row(const Draws *all, int64_t row, int64_t first, float *weights, double *sums, int64_t *runners)
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
    if (!(mass > 0))
        all->drawn[row] = 0;
    else if (all->places[row] < 0)
        all->drawn[row] = drawn_from(weights, sums, all->size, all->uniforms[row] * mass);
    else
        all->drawn[row] = won(all, row, weights, sums, mass, runners);
    all->masses[row] = (float)(mass / total + 0 * inside); // NaN where only a listed number is
}

// Return how many bytes `draw` needs beside its arguments.
int64_t specdec_draw_room(int64_t size)
{
    const int64_t numbers = num_chunks(size) * (CHUNK * (int64_t)sizeof(float) + (int64_t)sizeof(double));
    return numbers + (MAX_RUNNERS + WIDEST) * (int64_t)sizeof(int64_t);
}

// Read and draw. A row is no distribution if its mass is NaN; its other results are then some numbers.
void specdec_draw(const Draws *all, char *room)
{
    double *sums = (double *)room;
    float *weights = (float *)(sums + num_chunks(all->size));
    int64_t *runners = (int64_t *)(weights + num_chunks(all->size) * CHUNK);
    memset(runners, 0, (MAX_RUNNERS + WIDEST) * sizeof *runners);
    for (int64_t row = 0, first = 0; row < all->num_rows; first = all->ends[row++])
        if (all->temperatures[row] == 0)
            draw_greedily(all, row, first);
        else
            draw_row(all, row, first, weights, sums, runners);
}

// Write the words of tokens [count] for a race; there is room for WIDEST more of both.
static void words_of(const int64_t *tokens, int64_t count, uint64_t seed, int64_t place, int64_t lanes, uint64_t *words)
{
    for (int64_t begin = 0; begin < count; begin += lanes)
        WITH_LANES(lanes, random_words, seed, (uint64_t)place, tokens + begin, words + begin);
}

// A draft's probabilities [num_rows, size], and the races that the target runs at these places.
typedef struct {
    const float *rows;
    int64_t stride, size, num_rows;
    const int64_t *names;  // [size]: the target's tokens; none: they are the draft's
    const uint64_t *seeds; // [num_rows]
    const int64_t *places; // [num_rows]
    int64_t count;         // of tokens to find in each row, at most MAX_FOUND
    int64_t *tokens;       // [num_rows, count], best first
    double *chances;       // [num_rows, count] to win; NaN where a row has no probabilities
    double spread;         // of what a draft does not know
    int64_t lanes;
} Guesses;

static void guess(const Guesses *all, int64_t row, int64_t *runners, uint64_t *words)
{
    const float *probs = all->rows + row * all->stride;
    int64_t *tokens = all->tokens + row * all->count, names[MAX_RUNNERS + WIDEST] = {0}, found = 0;
    double *chances = all->chances + row * all->count, sum = 0, rest = 1;
    int64_t count = WITH_LANES(all->lanes, find_from, probs, all->size, (float)MIN_GUESSED, MAX_RUNNERS, runners);
    count = count < MAX_RUNNERS ? count : MAX_RUNNERS;
    for (int64_t index = 0; index < count; index++)
        names[index] = all->names ? all->names[runners[index]] : runners[index];
    words_of(names, count, all->seeds[row], all->places[row], all->lanes, words);
    for (int64_t index = 0; index < count; index++) {
        const double prob = probs[runners[index]], chance = pow(prob / -log(unit(words[index])), 1 / all->spread);
        rest -= prob;
        sum += chance;
        int64_t rank = found < all->count ? found++ : all->count;
        for (; rank > 0 && chances[rank - 1] < chance; rank--)
            if (rank < all->count) {
                chances[rank] = chances[rank - 1];
                tokens[rank] = tokens[rank - 1];
            }
        if (rank < all->count) {
            chances[rank] = chance;
            tokens[rank] = names[index];
        }
    }
    sum += rest > 0 ? pow(rest, 1 / all->spread) : 0;
    for (int64_t rank = 0; rank < found; rank++)
        chances[rank] /= sum;
    for (; found < all->count; found++) {
        chances[found] = probs[0] == probs[0] ? 0 : NAN;
        tokens[found] = 0;
    }
}

// Find who most likely wins each race.
void specdec_guess(const Guesses *all)
{
    int64_t runners[MAX_RUNNERS + WIDEST];
    uint64_t words[MAX_RUNNERS + WIDEST];
    for (int64_t row = 0; row < all->num_rows; row++)
        guess(all, row, runners, words);
}

// Write the places of the `count` largest numbers of each row, the largest first; count is at most MAX_FOUND and `size`.
void specdec_find_largest(const float *rows, int64_t stride, int64_t size, int64_t num_rows, int64_t count,
                          int64_t lanes, int32_t *places)
{
    for (int64_t row = 0; row < num_rows; row++)
        WITH_LANES(lanes, find_largest, rows + row * stride, size, (int)count, places + row * count);
}
