/* The turns of a batch, compiled: what `by_numpy` of turns.py does, whose arrays these are, without a temporary one.
 *
 * Plain C, without Python: it is loaded by ctypes. The file includes itself, once for each dtype of h. All numbers are
 * whole, so that sums are exact in any order; several at a time are what a compiler can vectorise by itself.
 */
#ifndef H

#include <math.h>
#include <stdint.h>

#define H float
#define TURNS turns_float32
#include "turns.c"
#undef H
#undef TURNS
#define H double
#define TURNS turns_float64
#include "turns.c"

#else

int64_t TURNS(double *restrict n, const H *restrict h, const H *restrict rows, const int64_t *restrict at,
              int64_t *restrict occupant, int64_t *restrict position, int64_t *restrict evicted,
              double *restrict level, int64_t count, int64_t slots, int64_t compete, int64_t first)
{
    const int64_t items = count + slots;
    for (int64_t b = 0; first < 0 && b < count; b++) {
        const H *seen = h + b * items + count;
        double sums[4] = {n[b], 0.0, 0.0, 0.0};
        int64_t slot = 0;
        for (; slot + 4 <= slots; slot += 4)
            for (int lane = 0; lane < 4; lane++)
                sums[lane] += seen[slot + lane];
        for (; slot < slots; slot++)
            sums[0] += seen[slot];
        n[b] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
    for (int64_t b = first < 0 ? 0 : first; b < count; b++) {
        const H *gained = h + b * items;
        int64_t p = 0;
        double highest = -INFINITY;
        for (int64_t slot = 0; slot < slots; slot++) {
            const int64_t item = occupant[slot];
            const double value = compete ? n[item] + gained[item] : n[item];
            if (value > highest) {
                p = slot;
                highest = value;
            }
        }
        if (compete && n[b] > highest) {
            position[b] = -1;
            evicted[b] = b;
            level[b] = n[b];
            continue;
        }
        const int64_t gone = occupant[p];
        const int64_t row = gone < count ? 0 : at[gone - count];
        if (row < 0)
            return b;
        position[b] = p;
        evicted[b] = gone;
        level[b] = highest;
        /* first the one, then the other: the difference of two h would be rounded to their dtype */
        if (gone < count) {
            const H *lost = h + gone * items;
            for (int64_t item = 0; item < items; item++)
                n[item] = (n[item] + gained[item]) - lost[item];
        } else {
            const H *lost = rows + row * slots;
            for (int64_t item = 0; item < count; item++)
                n[item] = (n[item] + gained[item]) - h[item * items + gone];
            for (int64_t slot = 0; slot < slots; slot++)
                n[count + slot] = (n[count + slot] + gained[count + slot]) - lost[slot];
        }
        occupant[p] = b;
    }
    return count;
}

#endif
