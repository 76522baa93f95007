// The memory that the ranks of one communicator share, with the ranks' identities. It is a file: anonymous for ranks of
// one process, else in /dev/shm under a unique name, which is removed once all ranks have mapped the file. From then on
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

constexpr char kNamePrefix[] = "infiniccl-"; // of the file name
constexpr int kMaxRanks = 64;
constexpr size_t kSlotBytes = 512 * 1024;        // of a rank's slot: the most data moved in a step
constexpr size_t kChannelSlotBytes = 128 * 1024; // of a channel's slot

// The description of a rank's call that other ranks compare with theirs.
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
    uint32_t checked;            // rank 0's INFINI_CCL_CHECK
    std::atomic<int32_t> mapped; // how many ranks have mapped the file
    std::atomic<int32_t> failed; // a Failed; the fields below are written once, before it becomes kFailed
    infiniStatus_t status;
    char sentence[1024];
};

enum Presence : int32_t { kAbsent, kClaimed, kPresent, kLeft };

struct alignas(128) Member {
    std::atomic<int32_t> presence;
    int32_t pid;
    uint64_t started;       // start time in the kernel's ticks, because a process id may be reused
    uint64_t pid_namespace; // processes of another namespace cannot be looked up
};

// Written by its rank only. On one cache line, so that flag and signature move in one transfer; 128 bytes, because
// lines are fetched in pairs.
struct alignas(128) Progress {
    std::atomic<uint64_t> posted; // steps; see the comment at the top of communicator.cpp
    Signature signatures[2];      // of the previous and of this step, indexed by the step's lowest bit
};

struct alignas(128) Channel {
    std::atomic<uint64_t> sent;                  // slots filled; written by the sender
    Signature signatures[2];                     // of the message in each slot
    alignas(128) std::atomic<uint64_t> received; // slots emptied; written by the receiver
};

// Whether INFINI_CCL_CHECK is 1: calls are compared before each collective. Throws for values other than 0 and 1.
bool checks_calls(const char *function);

class Segment {
public:
    // For ranks of this process. Throws an Error that names `function`, as the functions below do.
    static std::shared_ptr<Segment> anonymous(const char *function, int ranks);
    // Rank 0 creates the file (and removes those whose ranks were all killed while they joined); the others open it.
    // open returns nullptr if there is no file (yet).
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

    // The most bytes of a slot that one rank reduces in a two-phase reduction.
    size_t part_bytes() const { return part_bytes_; }

    // Allocates a channel's memory before its first message; throws on failure.
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

// Fills in the calling process's identity.
void describe_self(Member &member);

// Returns false only if the process has certainly ended.
bool is_alive(const Member &member);

} // namespace infini::ccl
