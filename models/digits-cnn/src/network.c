/* network.c: the arithmetic. A kernel keeps eight to ten vectors of sums in registers. */
#include "network.h"

#include "covey_math.h"
#include "covey_random.h"
#include "covey_support.h"

typedef float float4 __attribute__((vector_size(16)));
typedef float float4_anywhere __attribute__((vector_size(16), aligned(4)));
typedef uint32_t uint4 __attribute__((vector_size(16)));

enum { STREAM_FIRST = 1, STREAM_SECOND = 2, STREAM_DENSE = 3 };

#define IMAGE_ROW COLUMNS
#define FIRST_ROW (FIRST_SIDE * FIRST) /* floats of a row of `first` */
#define SPAN (TAPS * FIRST)            /* inputs of a row of the second kernel */
#define SPAN_VECTORS (SPAN / 4)

static inline float4 splat(float value) { return (float4){value, value, value, value}; }
static inline uint4 splat_integer(uint32_t value) { return (uint4){value, value, value, value}; }

uint32_t workspace_bytes(uint32_t examples) {
    return examples * (uint32_t)(sizeof(example) + SCORES * sizeof(float));
}

void workspace_place(workspace *work, void *block, uint32_t examples) {
    work->examples = block;
    work->scores = (float *)(work->examples + examples);
}

static void fill_uniform(float *weights, uint32_t count, float bound, uint64_t key) {
    for (uint32_t i = 0; i < count; i++) weights[i] = (2.0f * covey_random_float(key, i) - 1.0f) * bound;
}

void network_initialize(network *net, int64_t seed) {
    *net = (network){0};
    fill_uniform(&net->first_weight[0][0][0], TAPS * TAPS * FIRST, covey_sqrtf(6.0f / (TAPS * TAPS)),
                 covey_random_key(seed, STREAM_FIRST));
    fill_uniform(&net->second_weight[0][0][0][0], TAPS * TAPS * FIRST * SECOND,
                 covey_sqrtf(6.0f / (TAPS * TAPS * FIRST)), covey_random_key(seed, STREAM_SECOND));
    fill_uniform(&net->dense_weight[0][0], SECOND_SIZE * CLASSES, covey_sqrtf(6.0f / SECOND_SIZE),
                 covey_random_key(seed, STREAM_DENSE));
}

/* ---- Forward ------------------------------------------------------------------------------- */

/*
 * The maximum of four sums that lie in a square, ReLU, and where the window of the greatest begins. Of equals
 * the first counts. `from` is the window of the first sum, `right` and `down` how far it is to the others.
 */
static inline void maximum(const float4 sums[4], uint32_t from, uint32_t right, uint32_t down, float *value,
                           uint32_t *window) {
    float4 best = sums[0];
    uint4 where = splat_integer(from);
    const uint32_t at[4] = {from, from + right, from + down, from + down + right};
    for (int i = 1; i < 4; i++) {
        uint4 greater = (uint4)(sums[i] > best);
        best = (float4)((greater & (uint4)sums[i]) | (~greater & (uint4)best));
        where = (greater & splat_integer(at[i])) | (~greater & where);
    }
    *(float4 *)value = (float4)((uint4)(best > splat(0.0f)) & (uint4)best);
    *(uint4 *)window = where;
}

static void first_layer(const network *net, example *it) {
    float4 bias[2];
    for (int v = 0; v < 2; v++) bias[v] = *(const float4 *)(net->first_bias + 4 * v);
    for (uint32_t place = 0; place < FIRST_PLACES; place++) {
        uint32_t from = place / FIRST_SIDE * 2 * IMAGE_ROW + place % FIRST_SIDE * 2;
        float4 sums[2][4];
        for (int v = 0; v < 2; v++) {
            for (int i = 0; i < 4; i++) sums[v][i] = bias[v];
        }
        for (uint32_t y = 0; y < TAPS; y++) {
            const float *row = it->image + from + y * IMAGE_ROW;
            for (uint32_t x = 0; x < TAPS; x++) {
                const float4 *weight = (const float4 *)net->first_weight[y][x];
                float4 w0 = weight[0], w1 = weight[1];
                for (int i = 0; i < 4; i++) {
                    float4 pixel = splat(row[x + (i & 1) + (i >> 1) * IMAGE_ROW]);
                    sums[0][i] += pixel * w0;
                    sums[1][i] += pixel * w1;
                }
            }
        }
        for (uint32_t v = 0; v < 2; v++) {
            maximum(sums[v], from, 1, IMAGE_ROW, it->first + place * FIRST + 4 * v,
                    it->first_window + place * FIRST + 4 * v);
        }
    }
}

/* Eight of the sixteen channels at one place: `half` is 0 or 8. */
static inline void second_place(const network *net, example *it, uint32_t place, uint32_t half) {
    uint32_t from = place / SECOND_SIDE * 2 * FIRST_ROW + place % SECOND_SIDE * 2 * FIRST;
    float4 sums[2][4];
    for (int v = 0; v < 2; v++) {
        for (int i = 0; i < 4; i++) sums[v][i] = *(const float4 *)(net->second_bias + half + 4 * v);
    }
    for (uint32_t y = 0; y < TAPS; y++) {
        const float *row = it->first + from + y * FIRST_ROW;
        const float *weight = &net->second_weight[y][0][0][half];
        for (uint32_t k = 0; k < SPAN; k++) {
            const float4 *vectors = (const float4 *)(weight + k * SECOND);
            float4 w0 = vectors[0], w1 = vectors[1];
            for (int i = 0; i < 4; i++) {
                float4 value = splat(row[k + (i & 1) * FIRST + (i >> 1) * FIRST_ROW]);
                sums[0][i] += value * w0;
                sums[1][i] += value * w1;
            }
        }
    }
    for (uint32_t v = 0; v < 2; v++) {
        maximum(sums[v], from, FIRST, FIRST_ROW, it->second + place * SECOND + half + 4 * v,
                it->second_window + place * SECOND + half + 4 * v);
    }
}

static void second_layer(const network *net, example *it) {
    for (uint32_t place = 0; place < SECOND_PLACES; place++) {
        second_place(net, it, place, 0);
        second_place(net, it, place, 8);
    }
}

/* Copies the dense weights into rows of twelve. */
static void pad_dense(const network *net, float padded[SECOND_SIZE][SCORES]) {
    for (uint32_t k = 0; k < SECOND_SIZE; k++) {
        for (uint32_t c = 0; c < SCORES; c++) padded[k][c] = c < CLASSES ? net->dense_weight[k][c] : 0.0f;
    }
}

static void dense_layer(const network *net, const float padded[SECOND_SIZE][SCORES], const float *second,
                        float *scores) {
    float4 sum[3] = {0};
    for (uint32_t c = 0; c < CLASSES; c++) sum[c / 4][c % 4] = net->dense_bias[c];
    for (uint32_t k = 0; k < SECOND_SIZE; k++) {
        float4 value = splat(second[k]);
        for (int v = 0; v < 3; v++) sum[v] += value * ((const float4 *)padded[k])[v];
    }
    for (int v = 0; v < 3; v++) ((float4 *)scores)[v] = sum[v];
}

void network_gather(const chunk *data, const uint32_t *which, uint32_t count, uint64_t key, uint32_t shift,
                    workspace *work) {
    for (uint32_t e = 0; e < count; e++) {
        float *image = work->examples[e].image;
        memset(image, 0, SHEET * sizeof *image);
        chunk_draw(data, which[e], chunk_displacement(key, which[e], shift), image, IMAGE_ROW);
    }
}

void network_forward(const network *net, uint32_t count, workspace *work) {
    static float padded[SECOND_SIZE][SCORES] __attribute__((aligned(16)));
    pad_dense(net, padded);
    for (uint32_t e = 0; e < count; e++) {
        example *it = &work->examples[e];
        first_layer(net, it);
        second_layer(net, it);
        dense_layer(net, padded, it->second, work->scores + e * SCORES);
    }
}

void network_forward_image(const network *net, const uint8_t *image, float scores[CLASSES]) {
    static example one __attribute__((aligned(16)));
    static float twelve[SCORES] __attribute__((aligned(16)));
    for (uint32_t p = 0; p < PIXELS; p++) one.image[p] = (float)image[p] * GREY;
    workspace work = {&one, twelve};
    network_forward(net, 1, &work);
    for (uint32_t c = 0; c < CLASSES; c++) scores[c] = twelve[c];
}

float network_softmax(float scores[CLASSES]) {
    float highest = scores[0], total = 0.0f;
    for (int c = 1; c < CLASSES; c++) highest = scores[c] > highest ? scores[c] : highest;
    for (int c = 0; c < CLASSES; c++) {
        scores[c] = covey_expf(scores[c] - highest);
        total += scores[c];
    }
    for (int c = 0; c < CLASSES; c++) scores[c] /= total;
    return highest + covey_logf(total);
}

/* ---- Backward ------------------------------------------------------------------------------ */

/*
 * The gradients as they are summed: those of the second kernel by output channel, so that the inputs of a
 * kernel's row lie side by side; rows of the first kernel padded to two vectors.
 */
typedef struct {
    float first[FIRST][TAPS][8];
    float first_bias[FIRST];
    float second[SECOND][TAPS][SPAN];
    float second_bias[SECOND];
    float dense[SECOND_SIZE][SCORES];
    float dense_bias[SCORES];
} gradient;

/* The places at which a channel has a gradient: everywhere else ReLU was off, and nothing is added. */
typedef struct {
    uint32_t count;
    uint32_t window[FIRST_PLACES];
    float error[FIRST_PLACES];
} active;

static inline void find_active(active *found, const float *errors, const uint32_t *windows, uint32_t channels,
                               uint32_t places) {
    uint32_t count = 0;
    for (uint32_t place = 0; place < places; place++) {
        found->window[count] = windows[place * channels];
        found->error[count] = errors[place * channels];
        count += errors[place * channels] != 0.0f;
    }
    found->count = count;
}

/* Weights turned so that what is passed back is read side by side. */
typedef struct {
    float second[SECOND][TAPS][SPAN];
    float dense[CLASSES][SECOND_SIZE];
} turned;

static void turn(const network *net, turned *into) {
    for (uint32_t y = 0; y < TAPS; y++) {
        const float *row = &net->second_weight[y][0][0][0];
        for (uint32_t k = 0; k < SPAN; k++) {
            for (uint32_t o = 0; o < SECOND; o++) into->second[o][y][k] = row[k * SECOND + o];
        }
    }
    for (uint32_t k = 0; k < SECOND_SIZE; k++) {
        for (uint32_t c = 0; c < CLASSES; c++) into->dense[c][k] = net->dense_weight[k][c];
    }
}

static void dense_backward(const turned *weights, const float *scores, example *it, gradient *sum) {
    const float4 *row = (const float4 *)scores;
    for (int v = 0; v < 3; v++) ((float4 *)sum->dense_bias)[v] += row[v];
    for (uint32_t k = 0; k < SECOND_SIZE; k += 4) {
        float4 second = *(const float4 *)(it->second + k), error = {0};
        for (int i = 0; i < 4; i++) {
            float4 *into = (float4 *)sum->dense[k + (uint32_t)i];
            for (int v = 0; v < 3; v++) into[v] += splat(second[i]) * row[v];
        }
        for (int c = 0; c < CLASSES; c++) error += splat(scores[c]) * *(const float4 *)(weights->dense[c] + k);
        *(float4 *)(it->second_error + k) = (float4)((uint4)(second > splat(0.0f)) & (uint4)error);
    }
}

/* Adds one row of the second kernel's gradient for one channel. */
static inline void second_row(const active *at, const float *first, float *into) {
    float4 sum[SPAN_VECTORS];
    for (int v = 0; v < SPAN_VECTORS; v++) sum[v] = ((const float4 *)into)[v];
    for (uint32_t a = 0; a < at->count; a++) {
        const float4 *inputs = (const float4 *)(first + at->window[a]);
        float4 error = splat(at->error[a]);
        for (int v = 0; v < SPAN_VECTORS; v++) sum[v] += error * inputs[v];
    }
    for (int v = 0; v < SPAN_VECTORS; v++) ((float4 *)into)[v] = sum[v];
}

/* Adds what one row of the second kernel passes back for one channel. */
static inline void second_back(const active *at, const float *weights, float *errors) {
    float4 weight[SPAN_VECTORS];
    for (int v = 0; v < SPAN_VECTORS; v++) weight[v] = ((const float4 *)weights)[v];
    for (uint32_t a = 0; a < at->count; a++) {
        float4 *into = (float4 *)(errors + at->window[a]);
        float4 error = splat(at->error[a]);
        for (int v = 0; v < SPAN_VECTORS; v++) into[v] += error * weight[v];
    }
}

static void second_backward(const turned *weights, example *it, gradient *sum) {
    active at;
    memset(it->first_error, 0, sizeof it->first_error);
    for (uint32_t o = 0; o < SECOND; o++) {
        find_active(&at, it->second_error + o, it->second_window + o, SECOND, SECOND_PLACES);
        for (uint32_t a = 0; a < at.count; a++) sum->second_bias[o] += at.error[a];
        for (uint32_t y = 0; y < TAPS; y++) {
            second_row(&at, it->first + y * FIRST_ROW, sum->second[o][y]);
            second_back(&at, weights->second[o][y], it->first_error + y * FIRST_ROW);
        }
    }
    for (uint32_t i = 0; i < FIRST_SIZE; i += 4) {
        float4 *error = (float4 *)(it->first_error + i), first = *(const float4 *)(it->first + i);
        *error = (float4)((uint4)(first > splat(0.0f)) & (uint4)*error);
    }
}

static void first_backward(const example *it, gradient *sum) {
    active at;
    for (uint32_t o = 0; o < FIRST; o++) {
        float4 sums[TAPS][2];
        find_active(&at, it->first_error + o, it->first_window + o, FIRST, FIRST_PLACES);
        for (int y = 0; y < TAPS; y++) {
            for (int v = 0; v < 2; v++) sums[y][v] = ((const float4 *)sum->first[o][y])[v];
        }
        float bias = sum->first_bias[o];
        for (uint32_t a = 0; a < at.count; a++) {
            const float *window = it->image + at.window[a];
            float4 error = splat(at.error[a]);
            bias += at.error[a];
            for (int y = 0; y < TAPS; y++) {
                const float4_anywhere *row = (const float4_anywhere *)(window + y * IMAGE_ROW);
                sums[y][0] += error * row[0];
                sums[y][1] += error * row[1];
            }
        }
        sum->first_bias[o] = bias;
        for (int y = 0; y < TAPS; y++) {
            for (int v = 0; v < 2; v++) ((float4 *)sum->first[o][y])[v] = sums[y][v];
        }
    }
}

/* ---- The step ------------------------------------------------------------------------------ */

static inline void descend_one(float *weight, float *velocity, float sum, float scale, descent step) {
    float v = step.momentum * *velocity + sum * scale;
    *velocity = v;
    *weight -= step.rate * v;
}

static void descend(network *net, network *speed, const gradient *sum, float scale, descent step) {
    for (uint32_t y = 0; y < TAPS; y++) {
        for (uint32_t x = 0; x < TAPS; x++) {
            for (uint32_t i = 0; i < FIRST; i++) {
                descend_one(&net->first_weight[y][x][i], &speed->first_weight[y][x][i], sum->first[i][y][x],
                            scale, step);
                for (uint32_t o = 0; o < SECOND; o++) {
                    descend_one(&net->second_weight[y][x][i][o], &speed->second_weight[y][x][i][o],
                                sum->second[o][y][x * FIRST + i], scale, step);
                }
            }
        }
    }
    for (uint32_t i = 0; i < FIRST; i++) {
        descend_one(&net->first_bias[i], &speed->first_bias[i], sum->first_bias[i], scale, step);
    }
    for (uint32_t o = 0; o < SECOND; o++) {
        descend_one(&net->second_bias[o], &speed->second_bias[o], sum->second_bias[o], scale, step);
    }
    for (uint32_t c = 0; c < CLASSES; c++) {
        for (uint32_t k = 0; k < SECOND_SIZE; k++) {
            descend_one(&net->dense_weight[k][c], &speed->dense_weight[k][c], sum->dense[k][c], scale, step);
        }
        descend_one(&net->dense_bias[c], &speed->dense_bias[c], sum->dense_bias[c], scale, step);
    }
}

void network_descend(network *net, network *velocity, uint32_t count, descent step, workspace *work) {
    static gradient sum __attribute__((aligned(16)));
    static turned weights __attribute__((aligned(16)));
    memset(&sum, 0, sizeof sum);
    turn(net, &weights);
    for (uint32_t e = 0; e < count; e++) {
        example *it = &work->examples[e];
        dense_backward(&weights, work->scores + e * SCORES, it, &sum);
        second_backward(&weights, it, &sum);
        first_backward(it, &sum);
    }
    descend(net, velocity, &sum, 1.0f / (float)count, step);
}
