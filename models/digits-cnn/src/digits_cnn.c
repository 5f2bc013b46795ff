/* digits_cnn.c: the package `digits-cnn`: a convolutional network (network.h) behind what all readers of
 * digits-v1 share. */
#define COVEY_SUPPORT_IMPLEMENTATION
#include "covey_support.h"
#define DIGITS_V1_IMPLEMENTATION
#include "digits_v1.h"

#include "network.h"

#define BATCH_MOST 512u
#define EPOCHS_MOST 100u
#define EVALUATION_SLICE 64u
#include "digits_package.h"
