// A whole pass of a Llama-shaped model in products of bytes, behind a C interface. See docs/decisions/0015-native-cpu-kernels.md.
//
// Numbers of one row are computed from that row, its own keys and the weights alone; how rows are tiled, threaded or batched touches none
// of them. Compiled without contraction of a * b + c, so that the same operations are done on every CPU.
#include <algorithm>
#include <memory>
#include <vector>

#include "attention.h"
#include "crew.h"
#include "product4.h"

namespace {

// Bytes of weights that may stay in a cache from pass to pass: what a core has of it, on the CPUs of today. What a virtual machine says about
// its cache is that of the whole host.
constexpr int64_t CACHE = 64 << 20;

struct Layer {
    const float* before_attention;
    Linear qkv;
    const float* qk_norm;  // [heads + kv heads][dim], or null
    Linear out;
    const float* before_mlp;
    Linear gate_up;  // 32 rows of gate, the 32 of up, and so on
    Linear down;
};

struct Model {
    int64_t layer_count, hidden, heads, kv_heads, dim, inner, window, most_rows, threads;
    float eps;
    const float* embedding;         // [vocab][hidden]
    const float *cosines, *sines;   // [window][dim / 2]
    const Layer* layers;
    const float* norm;
    Linear head;
};

constexpr int64_t padded(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

// Rows of floats, aligned, each of whole panels.
struct Floats {
    std::unique_ptr<float[]> memory;
    float* start;
    int64_t stride;

    Floats(int64_t rows, int64_t width) : memory(new float[rows * padded(width) + LANES]()), stride(padded(width)) {
        start = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) / sizeof(float);
    }
    float* row(int64_t r) const { return start + r * stride; }
};

struct Bytes {
    std::vector<int8_t> values;
    std::vector<float> scale;
    std::vector<int32_t> sum, sums;
    int64_t width;

    Bytes(int64_t rows, int64_t n, bool grouped)
        : values(std::max(rows, TILE_ROWS) * n), scale(rows), sum(rows), sums(grouped ? rows * (n / SUMMED) : 0), width(n) {}
    Quantised view() { return {values.data(), scale.data(), sum.data(), width, sums.empty() ? nullptr : sums.data()}; }
};

// The rows of one call.
struct Batch {
    const int64_t* tokens;
    int64_t rows;
    const Segment* segments;
    int64_t segment_count;
    const int64_t* scored;
    int64_t scored_count;
    float* logits;
    int64_t columns;
};

inline bool any_coded(const Model& model) {
    bool found = model.head.coded != 0;
    for (int64_t l = 0; l < model.layer_count; l++) {
        const Layer& layer = model.layers[l];
        for (const Linear& linear : {layer.qkv, layer.out, layer.gate_up, layer.down}) found |= linear.coded != 0;
    }
    return found;
}

class Engine {
   public:
    explicit Engine(const Model& model)
        : m_(model),
          layers_(model.layers, model.layers + model.layer_count),
          crew_(static_cast<int>(model.threads)),
          x_(model.most_rows, model.hidden),
          qkv_(model.most_rows, (model.heads + 2 * model.kv_heads) * model.dim),
          mixed_(model.most_rows, model.heads * model.dim),
          inner_(model.most_rows, model.inner),
          room_(model.threads, model.hidden),
          scores_(model.threads * QUERIES, model.window + LANES),
          small_(model.most_rows, std::max(model.hidden, model.heads * model.dim), any_coded(model)),
          large_(model.most_rows, model.inner, any_coded(model)),
          broken_(model.most_rows),
          segment_of_(model.most_rows),
          position_(model.most_rows) {
        m_.layers = layers_.data();
        int64_t weights = model.head.panels() * PANEL * model.head.in;
        for (const Layer& layer : layers_)
            for (const Linear& linear : {layer.qkv, layer.out, layer.gate_up, layer.down}) weights += linear.panels() * PANEL * linear.in;
        paced_ = weights > CACHE;
    }

    void run(const Batch& batch) {
        place(batch);
        crew_.run([&](int i) { pass(batch, i); });
    }

   private:
    // Which segment and position each row has, and how attention is cut.
    void place(const Batch& b) {
        tiles_.clear();
        first_row_.clear();
        int64_t row = 0;
        for (int32_t s = 0; s < b.segment_count; s++) {
            first_row_.push_back(row);
            for (int64_t r = 0; r < b.segments[s].rows; r++, row++) {
                segment_of_[row] = s;
                position_[row] = b.segments[s].start + r;
                broken_[row] = 0;
            }
            cut_into_tiles(b.segments[s], s, m_.kv_heads, m_.heads / m_.kv_heads, tiles_);
        }
    }

    void pass(const Batch& b, int me) {
        const Share mine(b.rows, me, crew_.size());
        const Quantised small = small_.view(), large = large_.view();
        for (int64_t r = mine.from; r < mine.to; r++) std::memcpy(x_.row(r), m_.embedding + b.tokens[r] * m_.hidden, 4 * m_.hidden);
        for (int64_t l = 0; l < m_.layer_count; l++) {
            const Layer& layer = m_.layers[l];
            norms(mine, layer.before_attention, small, me);
            crew_.meet();
            product(layer.qkv, small, b.rows, me, [&](int64_t r, int64_t column, const auto& sums) {
                for (int j = 0; j < 4; j++) store(qkv_.row(r) + column + j * LANES, number(layer.qkv, sums, j, column, small.scale[r]));
            });
            crew_.meet();
            for (int64_t r = mine.from; r < mine.to; r++) turn_and_write(b, layer, l, r);
            crew_.meet();
            for (size_t i = me; i < tiles_.size(); i += crew_.size()) attention(b, tiles_[i], l, me);
            crew_.meet();
            for (int64_t r = mine.from; r < mine.to; r++) quantise(mixed_.row(r), m_.heads * m_.dim, small, r);
            crew_.meet();
            added_product(layer.out, small, b.rows, me);
            crew_.meet();
            norms(mine, layer.before_mlp, small, me);
            crew_.meet();
            gated_product(layer.gate_up, small, b.rows, me);
            crew_.meet();
            for (int64_t r = mine.from; r < mine.to; r++) quantise(inner_.row(r), m_.inner, large, r);
            crew_.meet();
            added_product(layer.down, large, b.rows, me);
            crew_.meet();
        }
        score_rows(b, me);
    }

    void norms(const Share& rows, const float* weight, const Quantised& to, int me) {
        for (int64_t r = rows.from; r < rows.to; r++) norm_and_quantise(x_.row(r), weight, m_.hidden, m_.eps, room_.row(me), to, r);
    }

    template <class Sink>
    void product(const Linear& linear, const Quantised& rows, int64_t count, int me, const Sink& sink) {
        const Share mine(linear.panels(), me, crew_.size());
        if (linear.coded != 0) return multiply_coded(linear, rows, count, mine.from, mine.to, sink);
        multiply(linear, rows, count, mine.from, mine.to, paced_, sink);
    }

    void added_product(const Linear& linear, const Quantised& rows, int64_t count, int me) {
        product(linear, rows, count, me, [&](int64_t r, int64_t column, const auto& sums) {
            for (int j = 0; j < 4; j++) {
                float* x = x_.row(r) + column + j * LANES;
                store(x, add(load(x), number(linear, sums, j, column, rows.scale[r])));
            }
        });
    }

    void gated_product(const Linear& linear, const Quantised& rows, int64_t count, int me) {
        product(linear, rows, count, me, [&](int64_t r, int64_t column, const auto& sums) {
            for (int j = 0; j < 2; j++) {
                const Lanes gate = number(linear, sums, j, column, rows.scale[r]), up = number(linear, sums, j + 2, column, rows.scale[r]);
                const Lanes slowed = div(gate, add(every(1.0f), exponential(sub(every(0.0f), gate))));
                store(inner_.row(r) + column / 2 + j * LANES, mul(slowed, up));
            }
        });
    }

    void turn_and_write(const Batch& b, const Layer& layer, int64_t l, int64_t r) {
        const int64_t dim = m_.dim, turned = m_.heads + m_.kv_heads, half = dim / 2;
        const Segment& s = b.segments[segment_of_[r]];
        float* row = qkv_.row(r);
        for (int64_t h = 0; h < turned; h++) {
            if (layer.qk_norm != nullptr) norm(row + h * dim, layer.qk_norm + h * dim, dim, m_.eps);
            turn(row + h * dim, m_.cosines + position_[r] * half, m_.sines + position_[r] * half, dim);
        }
        if (made_finite(row, (turned + m_.kv_heads) * dim)) broken_[r] = 1;
        for (int64_t h = 0; h < 2 * m_.kv_heads; h++) {
            float* plane = s.own + (l * 2 * m_.kv_heads + h) * s.own_capacity * dim;
            std::memcpy(plane + (position_[r] - s.base) * dim, row + (m_.heads + h) * dim, 4 * dim);
        }
    }

    void attention(const Batch& b, const Tile& tile, int64_t l, int me) {
        const int64_t row = first_row_[tile.segment];
        const Shape shape{m_.heads, m_.kv_heads, m_.dim};
        attend_tile(b.segments[tile.segment], tile, l, shape, qkv_.row(row), qkv_.stride, mixed_.row(row), mixed_.stride,
                    scores_.row(me * QUERIES), scores_.stride);
    }

    void score_rows(const Batch& b, int me) {
        const Quantised small = small_.view();
        const Share mine(b.scored_count, me, crew_.size());
        for (int64_t i = mine.from; i < mine.to; i++) {
            const int64_t r = b.scored[i];
            norm_and_quantise(x_.row(r), m_.norm, m_.hidden, m_.eps, room_.row(me), small, i);
            if (broken_[r]) give_up(small, i, m_.hidden);
        }
        crew_.meet();
        product(m_.head, small, b.scored_count, me, [&](int64_t i, int64_t column, const auto& sums) {
            float* to = b.logits + i * b.columns + column;
            const int64_t there = std::min(PANEL, b.columns - column);
            alignas(64) float whole[PANEL];
            float* into = there == PANEL ? to : whole;
            for (int j = 0; j < 4; j++) store(into + j * LANES, number(m_.head, sums, j, column, small.scale[i]));
            if (there < PANEL) std::memcpy(to, whole, 4 * there);
        });
    }

    Model m_;
    std::vector<Layer> layers_;
    Crew crew_;
    Floats x_, qkv_, mixed_, inner_, room_, scores_;
    Bytes small_, large_;
    std::vector<uint8_t> broken_;
    std::vector<int32_t> segment_of_;
    std::vector<int64_t> position_, first_row_;
    std::vector<Tile> tiles_;
    bool paced_;  // a pass reads its weights from memory
};

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT const char* specdec_source() { return SPECDEC_SOURCE; }

// weight [out][in] → packed [out padded to 64][in], scales [out padded]. `in` must be a multiple of 16.
EXPORT void specdec_pack(const float* weight, int64_t out, int64_t in, uint8_t* packed, float* scales) {
    pack(weight, out, in, packed, scales);
}

// As weights of 4 bits: packed [out padded to 64][in / 32] of 18 bytes. `in` must be a multiple of 32, importance [in].
EXPORT void specdec_pack_coded(const float* weight, int64_t out, int64_t in, const float* importance, uint8_t* packed) {
    pack_coded(weight, out, in, importance, packed);
}

// Answers null when there is no memory.
EXPORT void* specdec_open(const Model* model) {
    try {
        return new Engine(*model);
    } catch (...) {
        return nullptr;
    }
}

EXPORT void specdec_close(void* engine) { delete static_cast<Engine*>(engine); }

// numbers: rows, segments, scored rows; then the tokens, the scored rows, and of each segment own, parent (addresses), own_capacity,
// parent_capacity, base, start, rows. logits [scored][columns].
EXPORT int specdec_run(void* engine, const int64_t* numbers, float* logits, int64_t columns) {
    try {
        const int64_t rows = numbers[0], segments = numbers[1], scored = numbers[2];
        const int64_t *tokens = numbers + 3, *scored_rows = tokens + rows;
        static_assert(sizeof(Segment) == 7 * sizeof(int64_t));
        const auto* descriptors = reinterpret_cast<const Segment*>(scored_rows + scored);
        static_cast<Engine*>(engine)->run({tokens, rows, descriptors, segments, scored_rows, scored, logits, columns});
        return 0;
    } catch (...) {
        return 1;
    }
}

// Two parts of a step on their own, on one thread. rows [count][in] → out [count][linear.out padded to 64].
EXPORT void specdec_product(const Linear* linear, const float* rows, int64_t count, int64_t paced, float* out) {
    Bytes bytes(count, linear->in, linear->coded != 0);
    const Quantised quantised = bytes.view();
    for (int64_t r = 0; r < count; r++) quantise(rows + r * linear->in, linear->in, quantised, r);
    const auto sink = [&](int64_t r, int64_t column, const auto& sums) {
        float* to = out + r * padded(linear->out) + column;
        for (int j = 0; j < 4; j++) store(to + j * LANES, number(*linear, sums, j, column, quantised.scale[r]));
    };
    if (linear->coded != 0) return multiply_coded(*linear, quantised, count, 0, linear->panels(), sink);
    multiply(*linear, quantised, count, 0, linear->panels(), paced != 0, sink);
}

// Layer 0 of one segment: queries [rows][heads][dim] → out, the same shape.
EXPORT void specdec_attend(const Segment* segment, int64_t heads, int64_t kv_heads, int64_t dim, const float* queries, float* out) {
    const Shape shape{heads, kv_heads, dim};
    std::vector<Tile> tiles;
    cut_into_tiles(*segment, 0, kv_heads, heads / kv_heads, tiles);
    const Floats room(QUERIES, segment->start + segment->rows + LANES);
    for (const Tile& tile : tiles)
        attend_tile(*segment, tile, 0, shape, queries, heads * dim, out, heads * dim, room.start, room.stride);
}
