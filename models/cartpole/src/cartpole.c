/* cartpole.c: the package `cartpole` as Covey sees it. Dynamics: environment.c; learning: covey_ppo.h. */
#define COVEY_SUPPORT_IMPLEMENTATION
#include "covey_support.h"

#include "environment.h"

#include "covey_ppo.h"

/* An observation (4 f32) to the probabilities of its actions (2 f32). */
int32_t covey_predict(const void *input, uint32_t length, void *output, uint32_t capacity) {
    float observation[OBSERVATIONS];
    if (length != STORED) {
        return covey_fail(COVEY_BAD_ARGUMENT, "an observation has %u bytes, this one has %u", STORED, length);
    }
    if (!environment_observe(input, observation)) {
        return covey_fail(COVEY_BAD_DATA, "an observation is four finite numbers within a million of 0");
    }
    return policy_predict(&weights, observation, output, capacity);
}
