// The registered kinds of panels, sorted by number.
#include "panel_kinds.h"

#include <map>

#include "status.h"

namespace infini::linear_block_panels {
namespace {

// In a function: sources may register before this one's constants are made.
std::map<int64_t, PanelKind> &kinds() {
    static std::map<int64_t, PanelKind> all;
    return all;
}

} // namespace

RegisteredPanelKind::RegisteredPanelKind(const PanelKind &kind) {
    kinds().emplace(kind.number, kind);
}

const PanelKind *find_panel_kind(int64_t number) {
    const auto found = kinds().find(number);
    return found == kinds().end() ? nullptr : &found->second;
}

std::string known_panel_kinds() {
    std::string known;
    for (const auto &[number, kind] : kinds()) {
        known += message(known.empty() ? "" : ", ", number, " (", linear_blocks::find_kind(number)->name, ")");
    }
    return known;
}

} // namespace infini::linear_block_panels
