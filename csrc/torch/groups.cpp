// The table of groups.
#include "groups.h"

#include <map>
#include <mutex>
#include <shared_mutex>

namespace infini {
namespace {

struct Table {
    std::shared_mutex mutex;
    std::map<int64_t, std::shared_ptr<const Group>> groups{{kSelf, std::make_shared<Group>()}};
    int64_t next = kSelf + 1;
};

Table &table() {
    static auto *const made = new Table; // never destroyed: threads may still run at exit
    return *made;
}

} // namespace

std::shared_ptr<const Group> find_group(int64_t number) {
    Table &all = table();
    const std::shared_lock<std::shared_mutex> lock(all.mutex);
    const auto found = all.groups.find(number);
    return found == all.groups.end() ? nullptr : found->second;
}

} // namespace infini

using namespace infini;

int64_t infiniTorchGroupAdd(int64_t size, infinicclComm_t comm, CollectiveFunction function) {
    Table &all = table();
    const std::lock_guard<std::shared_mutex> lock(all.mutex);
    all.groups.emplace(all.next, std::make_shared<Group>(Group{size, comm, function}));
    return all.next++;
}

void infiniTorchGroupRemove(int64_t number) {
    Table &all = table();
    const std::lock_guard<std::shared_mutex> lock(all.mutex);
    all.groups.erase(number);
}
