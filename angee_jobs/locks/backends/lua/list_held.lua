-- One page of the live holds. A hold that is there all the time is on at least one page, whatever others come and go.
--
-- KEYS  the index
-- ARGV  cursor, length of a page, what stands before a name in the key of its hold
-- Returns the time in microseconds, the next cursor, and name and hold of each.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local page = redis.call('ZSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
local answer = {string.format('%.0f', now), page[1]}
for i = 1, #page[2], 2 do
    local name = page[2][i]
    if tonumber(page[2][i + 1]) > now then
        local hold = redis.pcall('GET', ARGV[3] .. name)
        if type(hold) == 'string' and #hold >= 112 and not string.find(string.sub(hold, 1, 48), '%D') then
            answer[#answer + 1] = name
            answer[#answer + 1] = hold
        end
    end
end
return answer
