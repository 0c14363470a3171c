// The part of the search for a row's winner that hashes every id: whole numbers only, so the answer is that of specdec/noise.py on any CPU.
#include <cstdint>

namespace {

constexpr uint64_t FIRST = 0xBF58476D1CE4E5B9u, SECOND = 0x94D049BB133111EBu;
// Ids that are passed over together when none of them is loud. A power of two.
constexpr int64_t GROUP = 32;

// What mix64 makes of x = (key ^ id ^ (key ^ id) >> 30) * FIRST, without its last step.
inline uint64_t word(uint64_t x) { return (x ^ (x >> 27)) * SECOND; }

inline int64_t keep(const uint64_t* words, int64_t start, int64_t end, uint64_t limit, int64_t* places) {
    int64_t found = 0;
    for (int64_t i = start; i < end; i++)
        if (words[i - start] <= limit) places[found++] = i;
    return found;
}

// `product(start, i)`: x of place start + i.
template <typename Product>
inline int64_t loud(Product product, int64_t count, uint64_t limit, int64_t* places) {
    int64_t found = 0, start = 0;
    uint64_t words[GROUP];
    for (; start + GROUP <= count; start += GROUP) {
        uint64_t least = ~uint64_t(0);
        for (int64_t i = 0; i < GROUP; i++) {
            words[i] = word(product(start, i));
            least = words[i] < least ? words[i] : least;
        }
        if (least <= limit) found += keep(words, start, start + GROUP, limit, places + found);
    }
    for (int64_t i = 0; start + i < count; i++) words[i] = word(product(start, i));
    return found + keep(words, start, count, limit, places + found);
}

}  // namespace

// Ascending places, of `count` ids, whose words are at most `limit`; how many they are. `ids`: below 2**30; null: 0 to count - 1.
// `places` has room for all.
extern "C" __attribute__((visibility("default"))) int64_t specdec_loud(
    uint64_t key, const uint64_t* ids, int64_t count, uint64_t limit, int64_t* places) {
    const uint64_t folded = key ^ (key >> 30);  // of an id, which has no bits that move down, nothing is folded
    if (ids != nullptr) return loud([=](int64_t start, int64_t i) { return (folded ^ ids[start + i]) * FIRST; }, count, limit, places);
    // (folded ^ id) is a part that all ids of a group share plus one of GROUP others, in another order: one multiplication serves them all.
    uint64_t others[GROUP];
    for (int64_t i = 0; i < GROUP; i++) others[i] = ((folded ^ i) & (GROUP - 1)) * FIRST;
    const uint64_t shared = folded & ~uint64_t(GROUP - 1);
    return loud([&](int64_t start, int64_t i) { return (shared ^ start) * FIRST + others[i]; }, count, limit, places);
}
