/*
 * covey_policy.h: an actor and a critic for packages that make their own experience. Two perceptrons of two
 * hidden layers each (tanh), OBSERVATIONS-HIDDEN-HIDDEN-ACTIONS and OBSERVATIONS-HIDDEN-HIDDEN-1; f32,
 * 128-bit SIMD.
 *
 * Before including it, define OBSERVATIONS, ACTIONS and HIDDEN (a multiple of 32).
 *
 * Each sum runs over inputs, or examples, from first to last in one accumulator (a hidden layer, all
 * gradients), or in four of fixed places that are added pairwise (an output layer). It is the same for one
 * observation and for a batch, so the bits depend on the data and not on how the work is cut.
 */
#ifndef COVEY_POLICY_H
#define COVEY_POLICY_H

#include <stdint.h>

#include "covey_math.h"
#include "covey_random.h"
#include "covey_support.h"

_Static_assert(HIDDEN % 32 == 0, "kernels hold 32 columns of a hidden layer at once");

/* Examples that are computed together; a larger minibatch is several tiles. */
#define TILE 64

typedef float covey_float4 __attribute__((vector_size(16), aligned(4)));

#define WEIGHTS (2 * (OBSERVATIONS + 2 + HIDDEN) * HIDDEN + (ACTIONS + 1) * (HIDDEN + 1))
#define PADDED (WEIGHTS / 4 * 4 + 4)

/* The weights as they lie in memory and in manifest order. Hidden layers are [inputs][outputs], output
 * layers [outputs][inputs]: rows are what the kernels walk along. */
typedef struct {
    float actor_weight1[OBSERVATIONS][HIDDEN];
    float actor_bias1[HIDDEN];
    float actor_weight2[HIDDEN][HIDDEN];
    float actor_bias2[HIDDEN];
    float critic_weight1[OBSERVATIONS][HIDDEN];
    float critic_bias1[HIDDEN];
    float critic_weight2[HIDDEN][HIDDEN];
    float critic_bias2[HIDDEN];
    float actor_weight3[ACTIONS][HIDDEN];
    float critic_weight3[1][HIDDEN];
    float actor_bias3[ACTIONS];
    float critic_bias3[1];
    float padding[PADDED - WEIGHTS]; /* 0; no weights: whole vectors to step through */
} policy;

_Static_assert(sizeof(policy) == PADDED * sizeof(float), "weights lie without gaps");

/* One of the two networks, or its gradient. */
typedef struct {
    float (*weight1)[HIDDEN], *bias1, (*weight2)[HIDDEN], *bias2, (*weight3)[HIDDEN], *bias3;
    uint32_t outputs;
} network;

static inline network policy_actor(policy *of) {
    return (network){of->actor_weight1, of->actor_bias1, of->actor_weight2, of->actor_bias2,
                     of->actor_weight3, of->actor_bias3, ACTIONS};
}

static inline network policy_critic(policy *of) {
    return (network){of->critic_weight1, of->critic_bias1, of->critic_weight2, of->critic_bias2,
                     of->critic_weight3, of->critic_bias3, 1};
}

static inline covey_float4 covey_splat(float value) { return (covey_float4){value, value, value, value}; }

/* x, or the nearer of -most and most. */
static inline covey_float4 covey_within(covey_float4 x, float most) {
    return __builtin_wasm_pmin_f32x4(__builtin_wasm_pmax_f32x4(x, covey_splat(-most)), covey_splat(most));
}

/*
 * tanh x, within 4e-7: x P(x^2) / Q(x^2), both of degree 4, fitted to the least relative error on
 * |x| <= 8.5, where tanh becomes 1 in f32.
 */
static inline covey_float4 covey_tanh4(covey_float4 x) {
    x = covey_within(x, 8.5f);
    covey_float4 z = x * x;
    covey_float4 p = z * 1.4269325961e-8f + 2.1251113262e-5f;
    p = p * z + 3.5340310147e-3f;
    p = p * z + 1.3413250426e-1f;
    p = p * z + 9.9999998819e-1f;
    covey_float4 q = z * 8.1451629217e-7f + 3.3488716172e-4f;
    q = q * z + 2.6022767156e-2f;
    q = q * z + 4.6746573163e-1f;
    q = q * z + 1.0f;
    return covey_within(x * p / q, 1.0f);
}

/* ---- Initial weights ------------------------------------------------------------------------- */

static inline void policy_fill(float *weights, uint32_t count, float bound, int64_t seed, uint64_t stream) {
    uint64_t key = covey_random_key(seed, stream);
    for (uint32_t i = 0; i < count; i++) weights[i] = (2.0f * covey_random_float(key, i) - 1.0f) * bound;
}

/*
 * Uniform within sqrt(6 / inputs) in hidden layers, sqrt(3 / inputs) in the critic's output and a
 * hundredth of that in the actor's, so that play begins close to uniform. Biases are 0. A pure function
 * of the seed; uses its streams 1 to 6.
 */
static inline void policy_initialize(policy *it, int64_t seed) {
    float first = covey_sqrtf(6.0f / OBSERVATIONS), second = covey_sqrtf(6.0f / HIDDEN);
    float last = covey_sqrtf(3.0f / HIDDEN);
    *it = (policy){0};
    policy_fill(&it->actor_weight1[0][0], OBSERVATIONS * HIDDEN, first, seed, 1);
    policy_fill(&it->actor_weight2[0][0], HIDDEN * HIDDEN, second, seed, 2);
    policy_fill(&it->actor_weight3[0][0], ACTIONS * HIDDEN, 0.01f * last, seed, 3);
    policy_fill(&it->critic_weight1[0][0], OBSERVATIONS * HIDDEN, first, seed, 4);
    policy_fill(&it->critic_weight2[0][0], HIDDEN * HIDDEN, second, seed, 5);
    policy_fill(&it->critic_weight3[0][0], HIDDEN, last, seed, 6);
}

/* ---- Forward --------------------------------------------------------------------------------- */

/* output = tanh(bias + sum over inputs of input * weight row). Inputs of 0 add nothing: they are skipped. */
static inline void policy_layer(float (*weight)[HIDDEN], const float *bias, const float *input,
                                uint32_t inputs, float *output) {
    for (uint32_t block = 0; block < HIDDEN; block += 32) {
        covey_float4 sum[8];
        for (int v = 0; v < 8; v++) sum[v] = *(const covey_float4 *)(bias + block + 4 * v);
        for (uint32_t i = 0; i < inputs; i++) {
            if (input[i] == 0.0f) continue;
            covey_float4 value = covey_splat(input[i]);
            const covey_float4 *row = (const covey_float4 *)(weight[i] + block);
            for (int v = 0; v < 8; v++) sum[v] += value * row[v];
        }
        for (int v = 0; v < 8; v++) *(covey_float4 *)(output + block + 4 * v) = covey_tanh4(sum[v]);
    }
}

static inline float policy_dot(const float *left, const float *right) {
    covey_float4 sum = {0};
    for (uint32_t k = 0; k < HIDDEN; k += 4) {
        sum += *(const covey_float4 *)(left + k) * *(const covey_float4 *)(right + k);
    }
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* Values of both hidden layers and the outputs for one observation. */
static inline void policy_forward(const network *net, const float *observation, float hidden1[HIDDEN],
                                  float hidden2[HIDDEN], float *output) {
    policy_layer(net->weight1, net->bias1, observation, OBSERVATIONS, hidden1);
    policy_layer(net->weight2, net->bias2, hidden1, HIDDEN, hidden2);
    for (uint32_t o = 0; o < net->outputs; o++) {
        output[o] = policy_dot(net->weight3[o], hidden2) + net->bias3[o];
    }
}

/* Logits to probabilities; returns the logarithm of what they were divided by. */
static inline float policy_softmax(const float logits[ACTIONS], float probabilities[ACTIONS]) {
    float highest = logits[0], total = 0.0f;
    for (int a = 1; a < ACTIONS; a++) highest = logits[a] > highest ? logits[a] : highest;
    for (int a = 0; a < ACTIONS; a++) {
        probabilities[a] = covey_expf(logits[a] - highest);
        total += probabilities[a];
    }
    for (int a = 0; a < ACTIONS; a++) probabilities[a] /= total;
    return highest + covey_logf(total);
}

/* covey_predict's work once the observation is there: the probabilities of its actions. */
static inline int32_t policy_predict(policy *of, const float *observation, void *output, uint32_t capacity) {
    float hidden1[HIDDEN], hidden2[HIDDEN], logits[ACTIONS], probabilities[ACTIONS];
    if (capacity < sizeof probabilities) {
        return covey_fail(COVEY_BAD_ARGUMENT, "probabilities need %u bytes, there are %u",
                          (uint32_t)sizeof probabilities, capacity);
    }
    network actor = policy_actor(of);
    policy_forward(&actor, observation, hidden1, hidden2, logits);
    float normaliser = policy_softmax(logits, probabilities);
    if (!(normaliser - normaliser == 0.0f)) {
        return covey_fail(COVEY_DIVERGED, "the probabilities aren't finite: the weights are too large");
    }
    memcpy(output, probabilities, sizeof probabilities);
    return (int32_t)sizeof probabilities;
}

/* ---- Backward -------------------------------------------------------------------------------- */

/* What a tile needs for one network: layer values, then (hidden2 first) their gradients in `back`. */
typedef struct {
    float hidden1[TILE][HIDDEN], hidden2[TILE][HIDDEN], back[TILE][HIDDEN];
} policy_scratch;

static inline void policy_transpose(float (*from)[HIDDEN], float (*to)[HIDDEN]) {
    for (uint32_t i = 0; i < HIDDEN; i++) {
        for (uint32_t o = 0; o < HIDDEN; o++) to[o][i] = from[i][o];
    }
}

/* gradient += output gradients x hidden2; back = their way to hidden2, before its tanh. */
static inline void policy_back_output(const network *net, network *gradient, const float *slopes,
                                      uint32_t count, policy_scratch *work) {
    for (uint32_t e = 0; e < count; e++) {
        const float *slope = slopes + e * net->outputs;
        for (uint32_t k = 0; k < HIDDEN; k += 4) {
            covey_float4 hidden = *(const covey_float4 *)(work->hidden2[e] + k), sum = {0};
            for (uint32_t o = 0; o < net->outputs; o++) {
                covey_float4 value = covey_splat(slope[o]);
                sum += value * *(const covey_float4 *)(net->weight3[o] + k);
                *(covey_float4 *)(gradient->weight3[o] + k) += value * hidden;
            }
            *(covey_float4 *)(work->back[e] + k) = sum * (1.0f - hidden * hidden);
        }
        for (uint32_t o = 0; o < net->outputs; o++) gradient->bias3[o] += slope[o];
    }
}

/* gradient of the second layer += hidden1 x back, four rows by eight columns at a time. */
static inline void policy_back_second(network *gradient, uint32_t count, const policy_scratch *work) {
    for (uint32_t i = 0; i < HIDDEN; i += 4) {
        for (uint32_t o = 0; o < HIDDEN; o += 8) {
            covey_float4 sum[4][2];
            for (int r = 0; r < 4; r++) {
                const float *row = gradient->weight2[i + r] + o;
                sum[r][0] = *(const covey_float4 *)row;
                sum[r][1] = *(const covey_float4 *)(row + 4);
            }
            for (uint32_t e = 0; e < count; e++) {
                covey_float4 left = *(const covey_float4 *)(work->back[e] + o);
                covey_float4 right = *(const covey_float4 *)(work->back[e] + o + 4);
                for (int r = 0; r < 4; r++) {
                    covey_float4 value = covey_splat(work->hidden1[e][i + r]);
                    sum[r][0] += value * left;
                    sum[r][1] += value * right;
                }
            }
            for (int r = 0; r < 4; r++) {
                float *row = gradient->weight2[i + r] + o;
                *(covey_float4 *)row = sum[r][0];
                *(covey_float4 *)(row + 4) = sum[r][1];
            }
        }
    }
    for (uint32_t e = 0; e < count; e++) {
        for (uint32_t o = 0; o < HIDDEN; o += 4) {
            *(covey_float4 *)(gradient->bias2 + o) += *(const covey_float4 *)(work->back[e] + o);
        }
    }
}

/* back = its way from hidden2 to hidden1, before the latter's tanh. `across` is weight2 transposed. */
static inline void policy_back_hidden(float (*across)[HIDDEN], uint32_t count, policy_scratch *work) {
    static float slope[HIDDEN];
    for (uint32_t e = 0; e < count; e++) {
        for (uint32_t block = 0; block < HIDDEN; block += 32) {
            covey_float4 sum[8] = {0};
            for (uint32_t o = 0; o < HIDDEN; o++) {
                covey_float4 value = covey_splat(work->back[e][o]);
                const covey_float4 *row = (const covey_float4 *)(across[o] + block);
                for (int v = 0; v < 8; v++) sum[v] += value * row[v];
            }
            for (int v = 0; v < 8; v++) *(covey_float4 *)(slope + block + 4 * v) = sum[v];
        }
        for (uint32_t k = 0; k < HIDDEN; k += 4) {
            covey_float4 hidden = *(const covey_float4 *)(work->hidden1[e] + k);
            covey_float4 back = *(const covey_float4 *)(slope + k) * (1.0f - hidden * hidden);
            *(covey_float4 *)(work->back[e] + k) = back;
        }
    }
}

/* gradient of the first layer += observation x back. */
static inline void policy_back_first(network *gradient, const float *observations, uint32_t count,
                                     const policy_scratch *work) {
    for (uint32_t e = 0; e < count; e++) {
        const float *observation = observations + e * OBSERVATIONS;
        for (uint32_t i = 0; i < OBSERVATIONS; i++) {
            if (observation[i] == 0.0f) continue;
            covey_float4 value = covey_splat(observation[i]);
            for (uint32_t o = 0; o < HIDDEN; o += 4) {
                covey_float4 back = *(const covey_float4 *)(work->back[e] + o);
                *(covey_float4 *)(gradient->weight1[i] + o) += value * back;
            }
        }
        for (uint32_t o = 0; o < HIDDEN; o += 4) {
            *(covey_float4 *)(gradient->bias1 + o) += *(const covey_float4 *)(work->back[e] + o);
        }
    }
}

/*
 * Adds the gradient of a tile of `count` <= TILE observations, whose hidden layers `work` has from
 * policy_forward, given the slopes of the loss in the outputs [count][outputs].
 */
static inline void policy_backward(const network *net, network *gradient, float (*across)[HIDDEN],
                                   const float *observations, const float *slopes, uint32_t count,
                                   policy_scratch *work) {
    policy_back_output(net, gradient, slopes, count, work);
    policy_back_second(gradient, count, work);
    policy_back_hidden(across, count, work);
    policy_back_first(gradient, observations, count, work);
}

/* ---- Steps ----------------------------------------------------------------------------------- */

/* Adam (D. P. Kingma, J. Ba 2015, arXiv:1412.6980, algorithm 1), with its moments from zero. */
typedef struct {
    float first[PADDED], second[PADDED];
    double power1, power2; /* beta1^t, beta2^t */
} adam;

#define ADAM_BETA1 0.9f
#define ADAM_BETA2 0.999f
#define ADAM_EPSILON 1e-5f

static inline void adam_start(adam *it) {
    memset(it, 0, sizeof *it);
    it->power1 = it->power2 = 1.0;
}

/* The gradient's Euclidean norm. */
static inline float policy_norm(const policy *gradient) {
    const float *values = (const float *)gradient;
    covey_float4 sum = {0};
    for (uint32_t i = 0; i < PADDED; i += 4) {
        covey_float4 value = *(const covey_float4 *)(values + i);
        sum += value * value;
    }
    return covey_sqrtf((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

/* weights -= rate * m / (sqrt(v) + epsilon), bias-corrected, for gradient * scale. */
static inline void adam_step(adam *it, policy *to, const policy *of, float scale, double rate) {
    float *to_values = (float *)to;
    const float *of_values = (const float *)of;
    it->power1 *= ADAM_BETA1;
    it->power2 *= ADAM_BETA2;
    float step = (float)(rate / (1.0 - it->power1));
    float root = (float)(1.0 / __builtin_sqrt(1.0 - it->power2));
    for (uint32_t i = 0; i < PADDED; i += 4) {
        covey_float4 *first = (covey_float4 *)(it->first + i), *second = (covey_float4 *)(it->second + i);
        covey_float4 g = *(const covey_float4 *)(of_values + i) * scale;
        covey_float4 m = *first * ADAM_BETA1 + g * (1.0f - ADAM_BETA1);
        covey_float4 v = *second * ADAM_BETA2 + g * g * (1.0f - ADAM_BETA2);
        *first = m;
        *second = v;
        *(covey_float4 *)(to_values + i) -= step * m / (__builtin_wasm_sqrt_f32x4(v) * root + ADAM_EPSILON);
    }
}

#endif
