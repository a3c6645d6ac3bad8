/* Cosines and sines of rotary positions, in double by operations that IEEE 754 rounds, so that all processors give the same. */

/* Of an angle from 0 on. n quarter turns are taken off by pi / 2 in three parts: the products with the first two, of 33 bits each,
 * are exact for n below 2^20. Polynomials: fdlibm's, off by less than 2^-57 in -pi/4 .. pi/4. Before it is rounded to
 * float32, a result is off by less than 1e-15. */
INLINE void cosine_sine(double angle, float *cosine, float *sine) {
    const double turns = angle * 6.36619772367581382433e-01 + 0x1.8p52; /* to the nearest whole number, ties to even */
    const double n = turns - 0x1.8p52;
    const double r = ((angle - n * 1.57079632673412561417e+00) - n * 6.07710050630396597660e-11) - n * 2.02226624879595063154e-21;
    const double z = r * r;
    double s = 1.58969099521155010221e-10, c = -1.13596475577881948265e-11;
    s = s * z - 2.50507602534068634195e-08;
    s = s * z + 2.75573137070700676789e-06;
    s = s * z - 1.98412698298579493134e-04;
    s = s * z + 8.33333333332248946124e-03;
    s = s * z - 1.66666666666666324348e-01;
    c = c * z + 2.08757232129817482790e-09;
    c = c * z - 2.75573143513906633035e-07;
    c = c * z + 2.48015872894767294178e-05;
    c = c * z - 1.38888888888741095749e-03;
    c = c * z + 4.16666666666666019037e-02;
    const double small = r + r * z * s, large = (1.0 - 0.5 * z) + z * z * c;
    uint64_t bits;
    memcpy(&bits, &turns, 8);
    const double one = bits & 1 ? small : large, other = bits & 1 ? large : small;
    *cosine = (float)((bits + 1) & 2 ? -one : one);
    *sine = (float)(bits & 2 ? -other : other);
}

/* Of `count` positions and `half` frequencies, both halves alike: [count][2 half], each times `scale`. The angle is a product
 * in float32. */
EXPORT void petalnode_rotary(const float *frequencies, int64_t half, float scale, const int64_t *positions, int64_t count,
                             float *cosines, float *sines) {
    for (int64_t at = 0; at < count; at++)
        for (int64_t i = 0; i < half; i++) {
            float *cosine = cosines + 2 * at * half + i, *sine = sines + 2 * at * half + i;
            cosine_sine((double)((float)positions[at] * frequencies[i]), cosine, sine);
            cosine[half] = *cosine *= scale, sine[half] = *sine *= scale;
        }
}
