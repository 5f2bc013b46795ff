/* network.c: the arithmetic. Kernels keep their sums in registers: 32 columns (eight vectors) at a time. */
#include "network.h"

#include "covey_math.h"
#include "covey_random.h"

typedef float float4 __attribute__((vector_size(16)));

#define BLOCK 32 /* columns whose sums a kernel holds at once */
#define VECTORS (BLOCK / 4)

enum { STREAM_HIDDEN = 1, STREAM_OUTPUT = 2 };

static inline float4 splat(float value) { return (float4){value, value, value, value}; }

static inline float4 select_positive(float4 of, float4 value) {
    typedef int32_t int4 __attribute__((vector_size(16)));
    return (float4)((int4)value & (int4)(of > splat(0.0f)));
}

uint32_t workspace_bytes(uint32_t examples) {
    uint32_t floats = workspace_rows(examples) * (HIDDEN + SCORES);
    uint32_t terms = 2 * workspace_rows(examples) * PIXELS;
    return floats * (uint32_t)sizeof(float) + terms * (uint32_t)sizeof(term) +
           (examples + 1) * (uint32_t)sizeof(uint32_t);
}

void workspace_place(workspace *work, void *block, uint32_t examples) {
    uint32_t rows = workspace_rows(examples);
    work->hidden = block;
    work->scores = work->hidden + rows * HIDDEN;
    work->terms = (term *)(work->scores + rows * SCORES);
    work->columns = work->terms + rows * PIXELS;
    work->starts = (uint32_t *)(work->columns + rows * PIXELS);
}

static void fill_uniform(float *weights, uint32_t count, float bound, uint64_t key) {
    for (uint32_t i = 0; i < count; i++) weights[i] = (2.0f * covey_random_float(key, i) - 1.0f) * bound;
}

void network_initialize(network *net, int64_t seed) {
    *net = (network){0};
    fill_uniform(&net->hidden_weight[0][0], PIXELS * HIDDEN, covey_sqrtf(6.0f / PIXELS),
                 covey_random_key(seed, STREAM_HIDDEN));
    fill_uniform(&net->output_weight[0][0], HIDDEN * CLASSES, covey_sqrtf(6.0f / HIDDEN),
                 covey_random_key(seed, STREAM_OUTPUT));
}

/* ---- Forward ------------------------------------------------------------------------------- */

/* hidden = max(0, bias + sum over terms of value * weights[row]). */
static void hidden_layer(const network *net, const term *terms, uint32_t count, float *hidden) {
    const float *weights = &net->hidden_weight[0][0];
    for (uint32_t block = 0; block < HIDDEN; block += BLOCK) {
        float4 sum[VECTORS];
        for (int v = 0; v < VECTORS; v++) sum[v] = *(const float4 *)(net->hidden_bias + block + 4 * v);
        for (uint32_t t = 0; t < count; t++) {
            const float4 *row = (const float4 *)(weights + terms[t].row + block);
            float4 value = splat(terms[t].value);
            for (int v = 0; v < VECTORS; v++) sum[v] += value * row[v];
        }
        for (int v = 0; v < VECTORS; v++) {
            *(float4 *)(hidden + block + 4 * v) = select_positive(sum[v], sum[v]);
        }
    }
}

/* Copies the output weights into rows of twelve. */
static void pad_output(const network *net, float padded[HIDDEN][SCORES]) {
    for (uint32_t k = 0; k < HIDDEN; k++) {
        for (uint32_t c = 0; c < SCORES; c++) padded[k][c] = c < CLASSES ? net->output_weight[k][c] : 0.0f;
    }
}

/* Logits of four examples. */
static void output_layer(const network *net, const float padded[HIDDEN][SCORES], const float *hidden,
                         float *scores) {
    float4 sum[4][3];
    for (int v = 0; v < 3; v++) {
        float4 bias = {0};
        for (int i = 0; i < 4; i++) {
            if (4 * v + i < CLASSES) bias[i] = net->output_bias[4 * v + i];
        }
        for (int e = 0; e < 4; e++) sum[e][v] = bias;
    }
    for (uint32_t k = 0; k < HIDDEN; k++) {
        const float4 *row = (const float4 *)padded[k];
        for (int e = 0; e < 4; e++) {
            float4 value = splat(hidden[e * HIDDEN + k]);
            for (int v = 0; v < 3; v++) sum[e][v] += value * row[v];
        }
    }
    for (int e = 0; e < 4; e++) {
        for (int v = 0; v < 3; v++) *(float4 *)(scores + e * SCORES + 4 * v) = sum[e][v];
    }
}

void network_gather(const chunk *data, const uint32_t *which, uint32_t count, uint64_t key, uint32_t shift,
                    workspace *work) {
    uint32_t found = 0;
    for (uint32_t e = 0; e < count; e++) {
        displacement by = chunk_displacement(key, which[e], shift);
        work->starts[e] = found;
        uint32_t last = data->starts[which[e] + 1];
        for (uint32_t i = data->starts[which[e]]; i < last; i++) {
            uint32_t y = (data->ink[i] >> 16) + by.down, x = (data->ink[i] >> 8 & 255) + by.right;
            if (y >= ROWS || x >= COLUMNS) continue;
            work->terms[found++] = (term){(y * COLUMNS + x) * HIDDEN, (float)(data->ink[i] & 255) * GREY};
        }
    }
    work->starts[count] = found;
}

void network_forward(const network *net, uint32_t count, workspace *work) {
    static float padded[HIDDEN][SCORES] __attribute__((aligned(16)));
    for (uint32_t e = 0; e < count; e++) {
        uint32_t first = work->starts[e];
        hidden_layer(net, work->terms + first, work->starts[e + 1] - first, work->hidden + e * HIDDEN);
    }
    pad_output(net, padded);
    for (uint32_t e = 0; e < count; e += 4) {
        output_layer(net, padded, work->hidden + e * HIDDEN, work->scores + e * SCORES);
    }
}

void network_forward_image(const network *net, const uint8_t *image, float scores[CLASSES]) {
    static float padded[HIDDEN][SCORES] __attribute__((aligned(16)));
    static float hidden[4 * HIDDEN] __attribute__((aligned(16)));
    static float four[4 * SCORES] __attribute__((aligned(16)));
    static term terms[PIXELS];
    uint32_t inked = 0;
    for (uint32_t p = 0; p < PIXELS; p++) {
        if (image[p]) terms[inked++] = (term){p * HIDDEN, (float)image[p] * GREY};
    }
    hidden_layer(net, terms, inked, hidden);
    pad_output(net, padded);
    output_layer(net, padded, hidden, four);
    for (uint32_t c = 0; c < CLASSES; c++) scores[c] = four[c];
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

static inline void descend_one(float *weight, float *velocity, float gradient, descent step) {
    float v = step.momentum * *velocity + gradient;
    *velocity = v;
    *weight -= step.rate * v;
}

/* Gradient of the output weights (rows of twelve): sum over examples of hidden x score gradient. */
static void output_gradient(const workspace *work, uint32_t count, float gradient[HIDDEN][SCORES]) {
    for (uint32_t k = 0; k < HIDDEN; k += 4) {
        float4 sum[4][3] = {0};
        for (uint32_t e = 0; e < count; e++) {
            const float4 *row = (const float4 *)(work->scores + e * SCORES);
            for (int i = 0; i < 4; i++) {
                float4 value = splat(work->hidden[e * HIDDEN + k + i]);
                for (int v = 0; v < 3; v++) sum[i][v] += value * row[v];
            }
        }
        for (int i = 0; i < 4; i++) {
            for (int v = 0; v < 3; v++) *(float4 *)&gradient[k + i][4 * v] = sum[i][v];
        }
    }
}

/* Replaces the hidden activations by their gradients: sum over classes, 0 where ReLU was off. */
static void hidden_gradient(const network *net, uint32_t count, workspace *work) {
    static float across[CLASSES][HIDDEN] __attribute__((aligned(16)));
    for (uint32_t k = 0; k < HIDDEN; k++) {
        for (uint32_t c = 0; c < CLASSES; c++) across[c][k] = net->output_weight[k][c];
    }
    for (uint32_t e = 0; e < count; e++) {
        const float *scores = work->scores + e * SCORES;
        for (uint32_t block = 0; block < HIDDEN; block += BLOCK) {
            float4 *hidden = (float4 *)(work->hidden + e * HIDDEN + block);
            float4 sum[VECTORS] = {0};
            for (int c = 0; c < CLASSES; c++) {
                const float4 *row = (const float4 *)(across[c] + block);
                for (int v = 0; v < VECTORS; v++) sum[v] += splat(scores[c]) * row[v];
            }
            for (int v = 0; v < VECTORS; v++) hidden[v] = select_positive(hidden[v], sum[v]);
        }
    }
}

static void descend_output(network *net, network *velocity, const float gradient[HIDDEN][SCORES],
                           uint32_t count, descent step, const workspace *work) {
    float scale = 1.0f / (float)count;
    for (uint32_t k = 0; k < HIDDEN; k++) {
        for (uint32_t c = 0; c < CLASSES; c++) {
            float *weight = &net->output_weight[k][c], *speed = &velocity->output_weight[k][c];
            descend_one(weight, speed, gradient[k][c] * scale, step);
        }
    }
    for (uint32_t c = 0; c < CLASSES; c++) {
        float sum = 0.0f;
        for (uint32_t e = 0; e < count; e++) sum += work->scores[e * SCORES + c];
        descend_one(&net->output_bias[c], &velocity->output_bias[c], sum * scale, step);
    }
    for (uint32_t k = 0; k < HIDDEN; k++) {
        float sum = 0.0f;
        for (uint32_t e = 0; e < count; e++) sum += work->hidden[e * HIDDEN + k];
        descend_one(&net->hidden_bias[k], &velocity->hidden_bias[k], sum * scale, step);
    }
}

/* Sorts the batch's ink by pixel, examples in order within each; ends[p] is where pixel p's terms end. */
static void sort_by_pixel(uint32_t count, uint32_t ends[PIXELS], workspace *work) {
    uint32_t start = 0;
    for (uint32_t p = 0; p < PIXELS; p++) ends[p] = 0;
    for (uint32_t t = 0; t < work->starts[count]; t++) ends[work->terms[t].row / HIDDEN]++;
    for (uint32_t p = 0; p < PIXELS; p++) {
        uint32_t inked = ends[p];
        ends[p] = start;
        start += inked;
    }
    for (uint32_t e = 0; e < count; e++) {
        for (uint32_t t = work->starts[e]; t < work->starts[e + 1]; t++) {
            work->columns[ends[work->terms[t].row / HIDDEN]++] = (term){e * HIDDEN, work->terms[t].value};
        }
    }
}

/* Gradient of the hidden weights, pixel by pixel, and their step at once: no gradient is stored. */
static void descend_hidden(network *net, network *velocity, const uint32_t ends[PIXELS], uint32_t count,
                           descent step, const workspace *work) {
    float4 scale = splat(1.0f / (float)count), rate = splat(step.rate);
    float4 momentum = splat(step.momentum);
    for (uint32_t p = 0; p < PIXELS; p++) {
        uint32_t first = p ? ends[p - 1] : 0;
        for (uint32_t block = 0; block < HIDDEN; block += BLOCK) {
            float4 sum[VECTORS] = {0};
            for (uint32_t t = first; t < ends[p]; t++) {
                const float4 *row = (const float4 *)(work->hidden + work->columns[t].row + block);
                float4 value = splat(work->columns[t].value);
                for (int v = 0; v < VECTORS; v++) sum[v] += value * row[v];
            }
            float4 *weight = (float4 *)(net->hidden_weight[p] + block);
            float4 *speed = (float4 *)(velocity->hidden_weight[p] + block);
            for (int v = 0; v < VECTORS; v++) {
                float4 next = momentum * speed[v] + sum[v] * scale;
                speed[v] = next;
                weight[v] -= rate * next;
            }
        }
    }
}

void network_descend(network *net, network *velocity, uint32_t count, descent step, workspace *work) {
    static float gradient[HIDDEN][SCORES] __attribute__((aligned(16)));
    static uint32_t ends[PIXELS];
    output_gradient(work, count, gradient);
    hidden_gradient(net, count, work);
    descend_output(net, velocity, gradient, count, step, work);
    sort_by_pixel(count, ends, work);
    descend_hidden(net, velocity, ends, count, step, work);
}
