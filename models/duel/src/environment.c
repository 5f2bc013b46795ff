/* environment.c: the court and its rules, and the opponent. */
#include "environment.h"

#include "covey_episodes.h"
#include "covey_policy.h"

#define WIDTH 1.5f
#define PADDLE 0.1f       /* half a paddle's height */
#define PADDLE_SPEED 0.03f
#define SERVE_SPEED 0.03f
#define SPEED_MOST 0.09f  /* across */
#define QUICKER 1.1f      /* what each hit multiplies the speed across by */
#define STEEPEST 0.06f    /* speed upwards after a hit at a paddle's very end */

/* Random streams of a game's key. */
enum { STREAM_SERVE = 1, STREAM_OPPONENT = 2 };

static policy opponent __attribute__((aligned(16)));
static int opponent_there;

/* ---- The opponent ---------------------------------------------------------------------------- */

int32_t opponent_ready(void) {
    if (opponent_there) return COVEY_OK;
    return covey_fail(COVEY_BAD_STATE, "play needs the auxiliary weights `opponent` (index 0)");
}

COVEY_EXPORT(covey_load_auxiliary)
int32_t covey_load_auxiliary(int32_t index, const void *bytes, uint32_t length) {
    if (index != 0) {
        return covey_fail(COVEY_BAD_ARGUMENT, "auxiliary file %d: this package has one, `opponent`, index 0",
                          index);
    }
    opponent_there = 0;
    if (length != WEIGHTS * sizeof(float)) {
        return covey_fail(COVEY_BAD_DATA, "the opponent has %u weights in %u bytes; these are %u bytes",
                          WEIGHTS, (uint32_t)(WEIGHTS * sizeof(float)), length);
    }
    memcpy(&opponent, bytes, WEIGHTS * sizeof(float));
    for (uint32_t i = 0; i < WEIGHTS; i++) {
        float value = ((const float *)&opponent)[i];
        if (!(value >= -1e6f && value <= 1e6f)) {
            return covey_fail(COVEY_BAD_DATA, "the opponent's weight %u isn't a number within 1e6 of 0", i);
        }
    }
    opponent_there = 1;
    return COVEY_OK;
}

/* The court as one side sees it: itself on the left. */
static void look(const environment *it, int from_right, float shown[OBSERVATIONS]) {
    shown[0] = (from_right ? WIDTH - it->across : it->across) * (2.0f / WIDTH) - 1.0f;
    shown[1] = it->height * 2.0f - 1.0f;
    shown[2] = (from_right ? -it->rushing : it->rushing) * (1.0f / SPEED_MOST);
    shown[3] = it->rising * (1.0f / STEEPEST);
    shown[4] = (from_right ? it->right : it->left) * 2.0f - 1.0f;
    shown[5] = (from_right ? it->left : it->right) * 2.0f - 1.0f;
}

/* What the opponent does: drawn from its policy, by the game's own random numbers. */
static uint32_t answer(const environment *it) {
    static float shown[OBSERVATIONS], hidden1[HIDDEN], hidden2[HIDDEN];
    float logits[ACTIONS], probabilities[ACTIONS];
    network actor = policy_actor(&opponent);
    look(it, 1, shown);
    policy_forward(&actor, shown, hidden1, hidden2, logits);
    policy_softmax(logits, probabilities);
    float uniform = covey_random_float(covey_random_key((int64_t)it->key, STREAM_OPPONENT), it->steps);
    float below = probabilities[0];
    uint32_t action = 0;
    while (action < ACTIONS - 1 && uniform >= below) below += probabilities[++action];
    return action;
}

/* ---- The game -------------------------------------------------------------------------------- */

/* The ball starts in the middle, towards the learner at the first serve and then to either side in turn. */
static void serve(environment *it) {
    uint64_t key = covey_random_key((int64_t)it->key, STREAM_SERVE);
    it->across = 0.5f * WIDTH;
    it->height = 0.2f + 0.6f * covey_random_float(key, 2 * it->serves);
    it->rising = (2.0f * covey_random_float(key, 2 * it->serves + 1) - 1.0f) * (0.5f * STEEPEST);
    it->rushing = it->serves % 2 ? SERVE_SPEED : -SERVE_SPEED;
    it->serves++;
}

void environment_reset(environment *it, uint64_t key) {
    *it = (environment){.left = 0.5f, .right = 0.5f, .key = key};
    serve(it);
}

static float moved(float paddle, uint32_t action) {
    float next = paddle + (action == 1 ? PADDLE_SPEED : action == 2 ? -PADDLE_SPEED : 0.0f);
    return next < PADDLE ? PADDLE : next > 1.0f - PADDLE ? 1.0f - PADDLE : next;
}

/* The ball at a paddle's line: true if it is hit, and then it flies back. */
static int hit(environment *it, float paddle, float line) {
    float offset = (it->height - paddle) * (1.0f / PADDLE), speed = -it->rushing * QUICKER;
    if (offset < -1.0f || offset > 1.0f) return 0;
    it->rushing = speed > SPEED_MOST ? SPEED_MOST : speed < -SPEED_MOST ? -SPEED_MOST : speed;
    it->rising = offset * STEEPEST;
    it->across = 2.0f * line - it->across;
    return 1;
}

float environment_step(environment *it, uint32_t action, uint32_t *end) {
    uint32_t other = answer(it);
    float reward = 0.0f;
    it->left = moved(it->left, action);
    it->right = moved(it->right, other);
    it->steps++;
    it->across += it->rushing;
    it->height += it->rising;
    if (it->height < 0.0f || it->height > 1.0f) {
        it->height = it->height < 0.0f ? -it->height : 2.0f - it->height;
        it->rising = -it->rising;
    }
    if (it->across <= 0.0f && !hit(it, it->left, 0.0f)) {
        reward = -1.0f;
        it->lost++;
    } else if (it->across >= WIDTH && !hit(it, it->right, WIDTH)) {
        reward = 1.0f;
        it->won++;
    }
    if (reward != 0.0f) serve(it);
    if (it->won == POINTS || it->lost == POINTS) *end = TERMINATED;
    return reward;
}

void environment_store(const environment *it, uint8_t *stored) {
    float shown[OBSERVATIONS];
    look(it, 0, shown);
    memcpy(stored, shown, sizeof shown);
}

int environment_observe(const uint8_t *stored, float *observation) {
    memcpy(observation, stored, STORED);
    for (int i = 0; i < OBSERVATIONS; i++) {
        if (!(observation[i] >= -2.0f && observation[i] <= 2.0f)) return 0;
    }
    return 1;
}
