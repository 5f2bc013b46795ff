/* gridworld.c: the package `gridworld` as Covey sees it. Rules: environment.c; learning: covey_ppo.h. */
#define COVEY_SUPPORT_IMPLEMENTATION
#include "covey_support.h"

#include "environment.h"

#include "covey_ppo.h"

/* A state (the 12 bytes of `environment`) to the probabilities of its actions (4 f32). */
int32_t covey_predict(const void *input, uint32_t length, void *output, uint32_t capacity) {
    float observation[OBSERVATIONS];
    if (length != STORED) {
        return covey_fail(COVEY_BAD_ARGUMENT, "a state has %u bytes, this one has %u", STORED, length);
    }
    if (!environment_observe(input, observation)) {
        return covey_fail(COVEY_BAD_DATA, "this state can't be: see environment.h for its twelve bytes");
    }
    return policy_predict(&weights, observation, output, capacity);
}
