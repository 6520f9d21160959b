// FlightTable: the accounts of what is posted and has not completed.
//
// Everything that a domain is given has an entry here, and its WorkId names it: the place in the table, and a generation
// against completions of an entry that was used again. There is no other kind of WorkId. The worker's.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/link.h"
#include "engine/request.h"
#include "engine/stream.h"
#include "lane/domain.h"

namespace kvc {

// A posted batch or message.
struct Flight {
  Stream* stream = nullptr;  // it does not end before this; null: an internal message
  RequestRef request{};
  size_t position = 0;  // of the batch, in its request
  uint32_t pages = 0;
  bool message = false;
  bool waits = false;  // it ended when its link broke, and is in Link::unsettled
  bool used = false;
  uint32_t goodbye_to = 0;  // an internal message: the peer that it says goodbye to; 0: it does not
  uint64_t bytes = 0;
  uint64_t charge = 0;  // of the link's window
  Link* link = nullptr;
  LocalMemory* source = nullptr;  // it is not deregistered before this

  // The counter that is raised by it.
  std::optional<uint32_t> counter() const;
};

class FlightTable {
 public:
  // `first_generation`: where the entries' generations begin. Any will do; tests begin near the end.
  explicit FlightTable(uint32_t first_generation = 0) : first_generation_(first_generation) {}

  // Enters it into the accounts of its link and its source. Then it is posted, or given back by put_back().
  WorkId take(Flight&& flight) {
    if (free_.empty()) grow();
    const uint32_t place = free_.back();
    free_.pop_back();
    Entry& entry = entries_[place];
    entry.flight = std::move(flight);
    entry.flight.used = true;
    enter(entry.flight);
    return (static_cast<WorkId>(entry.generation) << 32) | place;
  }
  void put_back(WorkId work);

  // The place of what is in flight under this id; nothing: it is not.
  std::optional<uint32_t> find(WorkId work) const noexcept;
  Flight& operator[](uint32_t place) noexcept { return entries_[place].flight; }
  const Flight& operator[](uint32_t place) const noexcept { return entries_[place].flight; }

  // It has ended on its link. Its place stays its own until end().
  void leave_link(uint32_t place);
  // What it was; its place is free, and its source no longer read.
  Flight end(uint32_t place);

 private:
  struct Entry {
    uint32_t generation = 0;
    Flight flight;
  };
  static void enter(const Flight& flight) {
    flight.link->bytes_in_flight += flight.charge;
    if (flight.message) ++flight.link->messages_in_flight;
    if (flight.source != nullptr) ++flight.source->batches_in_flight;
  }
  void grow();
  void free(uint32_t place);

  const uint32_t first_generation_;
  std::vector<Entry> entries_;
  std::vector<uint32_t> free_;
};

}  // namespace kvc
