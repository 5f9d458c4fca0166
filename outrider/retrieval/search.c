/* The longest suffix of a context in a corpus: in C, as `_longest_in_python` in suffix_array.py.
 *
 * `order` holds ends of prefixes of `tokens`, sorted by their tokens read backwards from the end.  A separator is before and
 * after every document; it is larger than all tokens, and nothing is compared across it.  The files are not trusted: no index
 * outside of them is read, whatever they contain.
 */
#include <stdint.h>

typedef struct {
    const void *tokens;
    const void *order;
    int64_t size;        /* of tokens */
    int64_t positions;      /* of order */
    int64_t token_bytes; /* 2 or 4 */
    int64_t order_bytes; /* 4 or 8 */
    int64_t separator;
} Corpus;

typedef struct {
    const int64_t *last; /* the context's last token */
    int64_t length;
} Context;

int outrider_search_version(void) { return 1; }

static inline int64_t token_at(const Corpus *corpus, int64_t at) {
    return corpus->token_bytes == 2 ? ((const uint16_t *)corpus->tokens)[at] : ((const uint32_t *)corpus->tokens)[at];
}

static inline int64_t end_at(const Corpus *corpus, int64_t position) {
    return corpus->order_bytes == 4 ? ((const int32_t *)corpus->order)[position] : ((const int64_t *)corpus->order)[position];
}

/* How many tokens the prefix at `position` shares with the context's end, `shared` of them known; whether it comes before it. */
static int64_t compare(const Corpus *corpus, Context context, int64_t position, int64_t shared, int *is_before) {
    const int64_t end = end_at(corpus, position);
    *is_before = 0;
    if (end < 0 || end > corpus->size) return 0;
    for (; shared < context.length; shared++) {
        if (shared >= end) {
            *is_before = 1;
            return shared;
        }
        const int64_t token = token_at(corpus, end - 1 - shared), wanted = context.last[-shared];
        if (token != wanted) {
            *is_before = token < wanted;
            return shared;
        }
    }
    return shared;
}

static int matches(const Corpus *corpus, Context context, int64_t position) {
    int is_before;
    return compare(corpus, context, position, 0, &is_before) == context.length;
}

/* The last position from `at` on, in steps of +1 or -1, that matches the whole context, as all between do.  `at` does. */
static int64_t furthest(const Corpus *corpus, Context context, int64_t at, int64_t step) {
    int64_t good = at, bad = step > 0 ? corpus->positions : -1;
    for (int64_t reach = 1;; reach *= 2) {
        const int64_t next = at + step * reach;
        if ((bad - next) * step <= 0) break;
        if (!matches(corpus, context, next)) {
            bad = next;
            break;
        }
        good = next;
    }
    while ((bad - good) * step > 1) {
        const int64_t middle = good + (bad - good) / 2;
        if (matches(corpus, context, middle)) good = middle;
        else bad = middle;
    }
    return good;
}

/* Returns the length of the longest suffix.  found[0] is the first of its positions, found[1] how many there are, and from
 * found[2] on the ends of at most `sample` of them, evenly spread.  Writes nothing for a match below `min_match` tokens.
 */
int64_t outrider_search_longest(
    const Corpus *corpus, const int64_t *tokens, int64_t length, int64_t min_match, int64_t sample, int64_t *found
) {
    Context context = {tokens + length - 1, 0};
    while (context.length < length) {
        const int64_t token = context.last[-context.length];
        if (token < 0 || token >= corpus->separator) break;
        context.length++;
    }
    int64_t low = 0, high = corpus->positions, before = 0, after = 0; /* tokens shared with the neighbours of [low, high) */
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        int is_before;
        const int64_t shared = compare(corpus, context, middle, before < after ? before : after, &is_before);
        if (is_before) {
            low = middle + 1;
            before = shared;
        } else {
            high = middle;
            after = shared;
        }
    }
    context.length = before > after ? before : after;
    if (context.length < min_match || context.length < 1) return 0;
    const int64_t first = before < context.length ? low : furthest(corpus, context, low - 1, -1);
    const int64_t last = after < context.length ? low - 1 : furthest(corpus, context, low, 1);
    const int64_t count = last - first + 1, taken = count < sample ? count : sample;
    found[0] = first;
    found[1] = count;
    for (int64_t i = 0; i < taken; i++) found[2 + i] = end_at(corpus, first + i * count / taken);
    return context.length;
}
