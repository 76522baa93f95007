// The memory that the ranks of one communicator share, with their identities. It is a file: an anonymous one for ranks
// of one process, else one in /dev/shm, under a unique name that is removed when all ranks have mapped it. From then on
// nothing has to be cleaned up, however the ranks end.
//
//   Header                       the number of ranks, and the reason of a failure
//   Member[ranks]                the identity of each rank
//   Progress[ranks]              the steps that each rank has posted: what the others spin on
//   Channel[ranks][ranks]        the messages sent and received between two ranks
//   data of each rank            2 slots, which the others read, and 2 results of two-phase reductions
//   data of each channel         2 slots; a channel has memory only once it is used
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "../backend.h"

namespace infini::ccl {

constexpr char kNamePrefix[] = "infiniccl-"; // of the file
constexpr int kMaxRanks = 64;
constexpr size_t kSlotBytes = 512 * 1024;        // of a rank's slot: what moves at a time
constexpr size_t kChannelSlotBytes = 128 * 1024; // of a channel's slot

// A rank's call, as the others compare it.
struct Signature {
    uint64_t count = 0;
    Kind kind = Kind::init;
    uint8_t dtype = 0;
    uint8_t op = 0;
    uint8_t peer = 0;
};

inline bool operator==(const Signature &a, const Signature &b) {
    return a.count == b.count && a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.peer == b.peer;
}

enum Failed : int { kSound, kFailing, kFailed };

struct alignas(128) Header {
    int32_t ranks;
    uint32_t checked;            // INFINI_CCL_CHECK of rank 0
    std::atomic<int32_t> mapped; // how many ranks have mapped it
    std::atomic<int32_t> failed; // a Failed; what follows is written once, before it becomes kFailed
    infiniStatus_t status;
    char sentence[1024];
};

enum Presence : int32_t { kAbsent, kClaimed, kPresent, kLeft };

struct alignas(128) Member {
    std::atomic<int32_t> presence;
    int32_t pid;
    uint64_t started;       // when, in the kernel's ticks: a process id may be reused
    uint64_t pid_namespace; // processes of another one cannot be looked up
};

// Written by its rank alone; one cache line, so that flag and signature move in one transfer. Lines are fetched in
// pairs: hence 128 bytes.
struct alignas(128) Progress {
    std::atomic<uint64_t> posted; // steps; see Ranks in communicator.cpp
    Signature signatures[2];      // of the step before and this one, by the step's lowest bit
};

struct alignas(128) Channel {
    std::atomic<uint64_t> sent;                  // slots filled, by the sender
    Signature signatures[2];                     // of the message in each slot
    alignas(128) std::atomic<uint64_t> received; // slots emptied, by the receiver
};

// Whether INFINI_CCL_CHECK asks that calls are compared before each collective; an error for other values than 0 and 1.
bool checks_calls(const char *function);

class Segment {
public:
    // For ranks of this process. Throws an Error in the name of `function`, as do those below.
    static std::shared_ptr<Segment> anonymous(const char *function, int ranks);
    // Rank 0 makes the file (and removes those of ranks that were all killed while they met), the others open it;
    // nullptr: it is not there (yet).
    static std::shared_ptr<Segment> create(const char *function, const std::string &path, int ranks);
    static std::shared_ptr<Segment> open(const char *function, const std::string &path, int ranks);

    ~Segment();
    Segment(const Segment &) = delete;
    Segment &operator=(const Segment &) = delete;

    Header &header() const { return *at<Header>(0); }
    Member &member(int rank) const { return at<Member>(members_)[rank]; }
    Progress &progress(int rank) const { return at<Progress>(progress_)[rank]; }
    Channel &channel(int from, int to) const { return at<Channel>(channels_)[from * ranks_ + to]; }

    // parity: 0 or 1.
    char *slot(int rank, int parity) const {
        return at<char>(data_) + static_cast<size_t>(rank) * rank_bytes_ + static_cast<size_t>(parity) * kSlotBytes;
    }
    char *result(int rank, int parity) const {
        return slot(rank, 0) + 2 * kSlotBytes + static_cast<size_t>(parity) * part_bytes_;
    }
    char *channel_slot(int from, int to, int parity) const {
        return at<char>(channel_data(from, to)) + static_cast<size_t>(parity) * kChannelSlotBytes;
    }

    // What a rank computes of a slot in a two-phase reduction, at most.
    size_t part_bytes() const { return part_bytes_; }

    // Before the first message of a channel: gives it its memory, or throws.
    void reserve_channel(const char *function, int from, int to) const;

private:
    Segment(int file, int ranks);
    static std::shared_ptr<Segment> make(const char *function, int file, int ranks);
    void map(const char *function);
    template <typename T> T *at(size_t offset) const { return reinterpret_cast<T *>(memory_ + offset); }
    size_t channel_data(int from, int to) const {
        return base_bytes_ + static_cast<size_t>(from * ranks_ + to) * 2 * kChannelSlotBytes;
    }
    void reserve(const char *function, size_t begin, size_t bytes) const;

    const int file_, ranks_;
    size_t members_, progress_, channels_, data_, rank_bytes_, part_bytes_, base_bytes_, bytes_;
    char *memory_ = nullptr;
};

// ---- processes ----

// Fills in the calling process.
void describe_self(Member &member);

// False: that process has certainly ended.
bool is_alive(const Member &member);

} // namespace infini::ccl
