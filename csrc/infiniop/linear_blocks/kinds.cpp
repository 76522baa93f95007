// The registered kinds, sorted by number.
#include "kinds.h"

#include <map>

#include "status.h"

namespace infini::linear_blocks {
namespace {

// In a function: sources may register before this one's constants are made.
std::map<int64_t, Kind> &kinds() {
    static std::map<int64_t, Kind> all;
    return all;
}

} // namespace

RegisteredKind::RegisteredKind(const Kind &kind) {
    kinds().emplace(kind.number, kind);
}

const Kind *find_kind(int64_t number) {
    const auto found = kinds().find(number);
    return found == kinds().end() ? nullptr : &found->second;
}

std::string known_kinds() {
    std::string known;
    for (const auto &[number, kind] : kinds()) {
        known += message(known.empty() ? "" : ", ", number, " (", kind.name, ")");
    }
    return known;
}

} // namespace infini::linear_blocks
