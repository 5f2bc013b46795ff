/*
 * network.h: a perceptron with one hidden layer, 784-128-10: ReLU, softmax, cross entropy, and
 * stochastic gradient descent with momentum. f32 throughout, 128-bit SIMD.
 *
 * Each element of each matrix product is summed by one accumulator in one order (inputs, or examples,
 * from first to last), whatever the tile or the batch it is computed in. So the bits depend on the data
 * and not on how the loops are cut.
 */
#ifndef DIGITS_NETWORK_H
#define DIGITS_NETWORK_H

#include <stdint.h>

#include "digits_v1.h"

#define HIDDEN 128
/* A row of ten class scores, padded to three vectors. */
#define SCORES 12

/* The weights as they lie in memory and in manifest order; row-major, [inputs][outputs]. */
typedef struct {
    float hidden_weight[PIXELS][HIDDEN];
    float hidden_bias[HIDDEN];
    float output_weight[HIDDEN][CLASSES];
    float output_bias[CLASSES];
} network;

#define WEIGHTS (PIXELS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES)
_Static_assert(sizeof(network) == WEIGHTS * sizeof(float), "weights lie without gaps");

/* One step of the optimizer: v = momentum v + mean gradient; w -= rate v. */
typedef struct {
    float rate, momentum;
} descent;

/* One inked pixel of one image: where its row (of weights, or of hidden values) begins, and its value. */
typedef struct {
    uint32_t row;
    float value;
} term;

/* What a minibatch needs. Rows come in fours, so that whole tiles can be computed. */
typedef struct {
    uint32_t *starts; /* [examples + 1] where an example's terms begin */
    term *terms;      /* [examples * PIXELS] the batch's ink by example; rows of weights */
    term *columns;    /* [examples * PIXELS] the same by pixel; rows of hidden values */
    float *hidden;    /* [rows][HIDDEN] activations, then their gradients */
    float *scores;    /* [rows][SCORES] logits, then probabilities, then their gradients */
} workspace;

/* Rows for so many examples. */
static inline uint32_t workspace_rows(uint32_t examples) { return (examples + 3) / 4 * 4; }

/* Memory for so many examples, and its layout in a zeroed block aligned to 16. */
uint32_t workspace_bytes(uint32_t examples);
void workspace_place(workspace *work, void *block, uint32_t examples);

/* He's initialisation, uniform: weights within sqrt(6 / inputs), biases 0. A pure function of the seed. */
void network_initialize(network *net, int64_t seed);

/*
 * Puts the images `which[0..count)` into the workspace. With shift > 0 each is moved by up to so many pixels
 * in each direction; what leaves the frame is lost. How far is a pure function of (key, image).
 */
void network_gather(const chunk *data, const uint32_t *which, uint32_t count, uint64_t key, uint32_t shift,
                    workspace *work);

/* Logits of the images in the workspace. */
void network_forward(const network *net, uint32_t count, workspace *work);

/* Scores of one image given as 784 bytes. */
void network_forward_image(const network *net, const uint8_t *image, float scores[CLASSES]);

/* Turns ten logits into probabilities; returns ln(sum of e^logit). */
float network_softmax(float scores[CLASSES]);

/*
 * One optimizer step, after network_forward and with the scores' gradients (probability - target) in
 * work->scores. `velocity` has the shape of the weights.
 */
void network_descend(network *net, network *velocity, uint32_t count, descent step, workspace *work);

#endif
