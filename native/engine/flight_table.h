// FlightTable: accounts for everything that is posted and has not completed.
//
// Each item given to a domain has an entry here, which its WorkId names. A WorkId holds the place in the table, and a
// generation that detects completions of a reused entry. No other kind of WorkId exists. Used on the transfer thread.
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
  Stream* stream = nullptr;  // the stream does not end before this flight; null: an internal message
  RequestRef request{};
  size_t position = 0;  // of the batch in its request
  uint32_t pages = 0;
  bool message = false;
  bool waits = false;  // it ended when its link broke, and is in Link::unsettled
  bool used = false;
  uint32_t goodbye_to = 0;  // the peer to which this internal message says goodbye; 0: no goodbye
  uint64_t bytes = 0;
  uint64_t charge = 0;  // bytes that it takes of the link's window
  Link* link = nullptr;
  LocalMemory* source = nullptr;  // not deregistered before this flight ends

  // The counter that it raises.
  std::optional<uint32_t> counter() const;
};

class FlightTable {
 public:
  // `first_generation`: the first generation of all entries. Any value works; tests start near the end of the range.
  explicit FlightTable(uint32_t first_generation = 0) : first_generation_(first_generation) {}

  // Adds a flight and charges it to its link and its source. The caller then posts it, or takes it back with
  // put_back().
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

  // The place of the flight with this id. No value: it is not in flight.
  std::optional<uint32_t> find(WorkId work) const noexcept;
  Flight& operator[](uint32_t place) noexcept { return entries_[place].flight; }
  const Flight& operator[](uint32_t place) const noexcept { return entries_[place].flight; }

  // Ends the charge of a flight on its link. The place stays in use until end().
  void leave_link(uint32_t place);
  // Removes a flight and returns it. Its place is free, and its source is no longer read.
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
