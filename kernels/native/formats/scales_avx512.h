/* The scales of a row of codes, one for each lane of a vector of sixteen; a part of quantized_avx512.h.
 *
 * They are read where they lie, with the codes that they belong to, which saves a pass over each row. What is rare, E8M0 of 0
 * and 255, or takes more, such as a global scale, is widened to fp32 before.
 */

enum { NUM_LANES = 16, SPAN_BYTES = 16, BYTES_BEHIND = 64 };

/* How the scales of a row are read: from the widened ones; or where they lie, E8M0 and bf16, or fp16. */
enum { SCALES_WIDENED, SCALES_UPPER, SCALES_HALVES, NUM_SCALE_READERS };

typedef struct {
    int shift;      /* binary logarithm of a group's columns */
    int reader;     /* of stored scales */
    int64_t bytes;  /* of a stored scale */
    __m512i expand; /* group of each lane, counted from the first of the block, or of the 64 codes of a DOT8 */
    __m512i pick;   /* bytes of each lane's scale among those of the block: the upper ones of fp32, or fp16 */
    __m512i down;   /* bits by which these are too high */
} LaneGroups;

static int reader_of(const Quantized *format, int64_t span) {
    if (format->global != GLOBAL_NONE || span > SPAN_BYTES) return SCALES_WIDENED;
    if (format->scale_type == SCALE_F16) return SCALES_HALVES;
    return format->scale_type == SCALE_E8M0 || format->scale_type == SCALE_BF16 ? SCALES_UPPER : SCALES_WIDENED;
}

/* For blocks of so many codes, of which every lane has some side by side, from the first on. */
static LaneGroups lane_groups(const Quantized *format, int64_t block_codes, const int32_t first_code[NUM_LANES]) {
    const int shift = group_shift(format), bytes = SCALE_BYTES[format->scale_type];
    const int64_t span = (shift < 62 && block_codes >> shift ? block_codes >> shift : 1) * bytes;
    LaneGroups groups = {.shift = shift, .reader = reader_of(format, span), .bytes = bytes,
                         .down = _mm512_set1_epi32(format->scale_type == SCALE_E8M0)};
    int32_t expand[NUM_LANES];
    uint8_t pick[4 * NUM_LANES];
    memset(pick, 0x80, sizeof pick); /* zeros */
    for (int lane = 0; lane < NUM_LANES; lane++) {
        expand[lane] = (int32_t)((int64_t)first_code[lane] >> shift);
        uint8_t *place = groups.reader == SCALES_HALVES ? pick + 2 * lane : pick + 4 * lane + 4 - bytes;
        for (int i = 0; i < bytes; i++) place[i] = (uint8_t)(expand[lane] * bytes + i);
    }
    groups.expand = _mm512_loadu_si512(expand);
    groups.pick = _mm512_loadu_si512(pick);
    return groups;
}

/* Of the codes that begin with an element. The last are those of a block that the row ends in: what lies behind its scales
 * would make NaN of the lanes of no code, whose sums are 0. */
INLINE __m512 scales_at(int reader, const LaneGroups *groups, const RowGroups *row, int64_t element, int is_last) {
    const int64_t first = element >> groups->shift;
    if (reader == SCALES_WIDENED) return _mm512_permutexvar_ps(groups->expand, _mm512_loadu_ps(row->scales + first));
    const char *place = row->stored + first * groups->bytes;
    const int64_t left = (row->groups - first) * groups->bytes;
    const __m128i stored = is_last ? _mm_maskz_loadu_epi8((__mmask16)((1u << left) - 1), place)
                                   : _mm_loadu_si128((const __m128i *)place);
    if (reader == SCALES_HALVES) {
        const __m256i both = _mm256_broadcastsi128_si256(stored);
        return _mm512_cvtph_ps(_mm256_shuffle_epi8(both, _mm512_castsi512_si256(groups->pick)));
    }
    const __m512i upper = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(stored), groups->pick);
    return _mm512_castsi512_ps(_mm512_srlv_epi32(upper, groups->down));
}

INLINE __m512i zeros_at(const LaneGroups *groups, const RowGroups *row, int64_t element) {
    return _mm512_permutexvar_epi32(groups->expand, _mm512_loadu_si512(row->zeros + (element >> groups->shift)));
}

/* Whether some E8M0 is 0 or 255, which are no exponents of normal numbers; those behind the last are looked at too. */
static int has_ends(const char *scales, int64_t count) {
    for (int64_t i = 0; i < count; i += BYTES_BEHIND) {
        const __m512i less_one = _mm512_sub_epi8(_mm512_loadu_si512(scales + i), _mm512_set1_epi8(1));
        if (_mm512_cmpge_epu8_mask(less_one, _mm512_set1_epi8((char)254))) return 1;
    }
    return 0;
}

/* Whether some stored scales of rows cannot be read as they lie: E8M0 of 0 or 255, or none behind the last. */
static int must_be_widened(const RowGroups *rows, int64_t count, int64_t behind) {
    const int64_t apart = rows[count - 1].stored - rows->stored, groups = rows->groups;
    if (behind < BYTES_BEHIND) return 1;
    if (rows->format->scale_type != SCALE_E8M0) return 0;
    if (apart <= 2 * count * groups) return has_ends(rows->stored, apart + groups); /* and between them */
    for (int64_t i = 0; i < count; i++)
        if (has_ends(rows[i].stored, groups)) return 1;
    return 0;
}

/* Reads the groups of some rows, and returns how their scales are to be read. Stored ones are read as whole vectors: behind
 * them must be those of other rows. */
static int read_lane_groups(int reader, RowGroups *rows, int64_t count, int64_t index) {
    const Quantized *format = rows->format;
    const int64_t stride = format->scale_stride;
    int64_t group = 0;
    for (int64_t i = 0; i < count; i++) {
        group = group_of(index + i, format->group_rows);
        rows[i].stored = format->scales + group * stride;
        if (reader == SCALES_WIDENED && rows[i].widened != group) {
            read_scales(format, index + i, rows[i].groups, rows[i].scales);
            rows[i].widened = group;
        }
        read_zeros(&rows[i], index + i);
    }
    if (reader == SCALES_WIDENED) return reader;
    const int64_t behind = (format->scale_rows - 1 - group) * stride;
    return must_be_widened(rows, count, behind) ? read_lane_groups(SCALES_WIDENED, rows, count, index) : reader;
}
