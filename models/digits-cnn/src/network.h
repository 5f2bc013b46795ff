/*
 * network.h: a convolutional network: 5 x 5 convolution to 8 channels, 2 x 2 maximum, ReLU; 5 x 5 convolution
 * to 16 channels, 2 x 2 maximum, ReLU; a dense layer to ten classes; softmax, cross entropy, and stochastic
 * gradient descent with momentum. f32 throughout, 128-bit SIMD.
 *
 *     image [28][28] -> first [12][12][8] -> second [4][4][16] -> scores [10]
 *
 * Convolutions have no border. Channels lie innermost everywhere. Each sum has one order (taps, then
 * channels; examples, then places), whatever the batch it is computed in: the bits depend on the data alone.
 */
#ifndef DIGITS_CNN_NETWORK_H
#define DIGITS_CNN_NETWORK_H

#include <stdint.h>

#include "digits_v1.h"

#define TAPS 5 /* rows and columns of a kernel */
#define FIRST 8 /* channels of the first convolution */
#define SECOND 16
#define FIRST_SIDE 12 /* rows and columns after the first maximum */
#define SECOND_SIDE 4
#define FIRST_PLACES (FIRST_SIDE * FIRST_SIDE)
#define SECOND_PLACES (SECOND_SIDE * SECOND_SIDE)
#define FIRST_SIZE (FIRST_PLACES * FIRST)
#define SECOND_SIZE (SECOND_PLACES * SECOND)
/* A row of ten class scores, padded to three vectors. */
#define SCORES 12
/* An image and what a kernel's last row may read past its end. */
#define SHEET (PIXELS + 16)

/* The weights as they lie in memory and in manifest order. */
typedef struct {
    float first_weight[TAPS][TAPS][FIRST];
    float first_bias[FIRST];
    float second_weight[TAPS][TAPS][FIRST][SECOND];
    float second_bias[SECOND];
    float dense_weight[SECOND_SIZE][CLASSES];
    float dense_bias[CLASSES];
} network;

#define WEIGHTS (TAPS * TAPS * FIRST * (1 + SECOND) + FIRST + SECOND + (SECOND_SIZE + 1) * CLASSES)
_Static_assert(sizeof(network) == WEIGHTS * sizeof(float), "weights lie without gaps");

/* One step of the optimizer: v = momentum v + mean gradient; w -= rate v. */
typedef struct {
    float rate, momentum;
} descent;

/* One example on its way through the network. */
typedef struct {
    float image[SHEET];
    float first[FIRST_SIZE]; /* after maximum and ReLU */
    float second[SECOND_SIZE];
    /* Where the window of each maximum begins: in `image`, in `first`; counted in floats. */
    uint32_t first_window[FIRST_SIZE];
    uint32_t second_window[SECOND_SIZE];
    float first_error[FIRST_SIZE]; /* gradients before ReLU and maximum */
    float second_error[SECOND_SIZE];
} example;

/* What a minibatch needs. */
typedef struct {
    example *examples;
    float *scores; /* [examples][SCORES] logits, then probabilities, then their gradients */
} workspace;

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
